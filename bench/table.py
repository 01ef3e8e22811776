"""Plain tables, and the two statistics in them."""

from collections.abc import Sequence
from statistics import median


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print one aligned table; floats with three significant digits."""
    cells = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    print(f"\n{title}")
    for i, row in enumerate(cells):
        print(
            "  "
            + "  ".join(
                cell.rjust(width) if j else cell.ljust(width)
                for j, (cell, width) in enumerate(zip(row, widths))
            )
        )
        if i == 0:
            print("  " + "  ".join("-" * width for width in widths), flush=True)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie (nearest rank); nan without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def middle(values: Sequence[float]) -> float:
    return median(values) if values else float("nan")


def _cell(value: object) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )
