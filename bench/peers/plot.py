"""Turns as a picture: a panel per number, a line per system, bars from its lowest to its highest turn."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bench.peers.results import loads, of, systems
from bench.peers.turn import METRICS, STEADY, Turn

_PANELS = ("tokens_s", "first_s", "gap_ms", "gap_p99_ms")


def plot(turns: Sequence[Turn], path: Path, title: str) -> None:
    """Write an SVG or PNG, by the name's end. Needs matplotlib: the extra `bench`."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # letters, not their outlines
    matplotlib.rcParams["svg.hashsalt"] = title  # the same turns give the same file
    from matplotlib import pyplot

    served = [turn for turn in turns if turn.clients != STEADY]
    figure, axes = pyplot.subplots(1, len(_PANELS), figsize=(4.2 * len(_PANELS), 4.2), layout="constrained")
    for metric, axis in zip(_PANELS, axes):
        for system in systems(served):
            clients = [number for number in loads(served) if of(served, system, number)]
            values = [[turn.numbers[metric] for turn in of(served, system, number)] for number in clients]
            middle = [median(found) for found in values]
            below = [mid - min(found) for mid, found in zip(middle, values)]
            above = [max(found) - mid for mid, found in zip(middle, values)]
            style = "-" if system.startswith("kvrelay") else "--"
            axis.errorbar(
                clients, middle, (below, above), label=system, marker="o", capsize=3, linestyle=style
            )
        axis.set_title(METRICS[metric], fontsize="medium")
        axis.set_xlabel("requests at once")
        axis.set_xscale("log", base=2)
        axis.set_xticks(loads(served), list(map(str, loads(served))))
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.suptitle(title)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
