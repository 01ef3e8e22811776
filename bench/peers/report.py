"""Tables of turns: what each system did, the ratios to its peers with their spread, and the goals."""

from collections.abc import Sequence
from statistics import median

from app.measure.table import show
from bench.peers.goal import GOALS, STEADY_GOAL, Goal
from bench.peers.ratio import Ratio
from bench.peers.results import loads, of, systems
from bench.peers.turn import STEADY, Turn

_SHOWN = ("tokens_s", "first_s", "first_p99_s", "gap_ms", "gap_p50_ms", "gap_p99_ms")
_STEADY_SHOWN = ("steady_p99_ms", "disturbed_p99_ms", "disturbed_ratio")
_OURS = "kvrelay"


def report(turns: Sequence[Turn]) -> None:
    served = [turn for turn in turns if turn.clients != STEADY]
    for clients in loads(served):
        _show_load(served, clients)
    _show_steady([turn for turn in turns if turn.clients == STEADY])
    _show_ratios(served)
    _show_goals(turns)


def _show_load(turns: Sequence[Turn], clients: int) -> None:
    rows: list[tuple[object, ...]] = []
    for system in systems(turns):
        if found := of(turns, system, clients):
            rows.append((system, len(found), *_medians(found, _SHOWN), _cpu(found)))
    header = ("system", "turns", "tokens/s", "TTFT s", "p99", "gap ms", "p50", "p99", "CPU ms per token")
    show(f"{clients} at once, medians of the turns", header, rows)


def _show_steady(turns: Sequence[Turn]) -> None:
    rows = [
        (system, len(of(turns, system, STEADY)), *_medians(of(turns, system, STEADY), _STEADY_SHOWN))
        for system in systems(turns)
    ]
    if rows:
        header = ("system", "turns", "p99 alone, ms", "p99 disturbed, ms", "ratio")
        show("A steady stream, and the same while long prompts arrive", header, rows)


def _show_ratios(turns: Sequence[Turn]) -> None:
    rows = []
    names = systems(turns)
    for ours in (name for name in names if name.startswith(_OURS)):
        for theirs in (name for name in names if not name.startswith(_OURS)):
            for clients in loads(turns):
                cells = [
                    Ratio.of(of(turns, ours, clients), of(turns, theirs, clients), metric)
                    for metric in ("tokens_s", "first_s", "gap_p50_ms", "gap_p99_ms")
                ]
                if any(cells):
                    rows.append((f"{ours} / {theirs}", clients, *map(_spread, cells)))
    if rows:
        show(
            "Ratios of medians (lowest to highest of neighbouring turns)",
            ("", "clients", "tokens/s", "TTFT", "gap p50", "gap p99"),
            rows,
        )


def _show_goals(turns: Sequence[Turn]) -> None:
    rows = []
    for goal in GOALS:
        found = Ratio.of(
            of(turns, goal.ours, goal.clients), of(turns, goal.theirs, goal.clients), goal.metric
        )
        if found is not None:
            compared = f"{goal.metric}, {goal.ours} / {goal.theirs}, {goal.clients}"
            rows.append(_goal_row(compared, goal, found.ratio, _spread(found)))
    if steady := of(turns, STEADY_GOAL.ours, STEADY):
        values = [turn.numbers[STEADY_GOAL.metric] for turn in steady]
        spread = f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
        rows.append(
            _goal_row(f"{STEADY_GOAL.metric}, {STEADY_GOAL.ours}", STEADY_GOAL, median(values), spread)
        )
    if rows:
        show("Goals", ("what", "goal", "ratio", "met"), rows)


def _goal_row(what: str, goal: Goal, ratio: float, spread: str) -> tuple[str, str, str, str]:
    return what, str(goal), spread, "yes" if goal.met(ratio) else "no"


def _spread(ratio: Ratio | None) -> str:
    return f"{ratio.ratio:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" if ratio else "-"


def _medians(turns: Sequence[Turn], metrics: Sequence[str]) -> list[float]:
    return [median(turn.numbers[metric] for turn in turns) for metric in metrics]


def _cpu(turns: Sequence[Turn]) -> str:
    """The CPU time of each process, of the turn in the middle by speed."""
    turn = sorted(turns, key=lambda turn: turn.numbers["tokens_s"])[len(turns) // 2]
    used = sorted(turn.cpu_ms_per_token.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {ms:.2g}" for name, ms in used if ms >= 0.05)
