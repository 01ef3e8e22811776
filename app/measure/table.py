"""Plain tables, and the two statistics in them."""

from collections.abc import Sequence
from statistics import median
from textwrap import indent


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print one table under its title."""
    print(f"\n{title}\n{indent(aligned(header, rows), '  ')}", flush=True)


def aligned(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The first column to the left, the others to the right; floats with three significant digits."""
    cells = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            cell.rjust(width) if j else cell.ljust(width) for j, (cell, width) in enumerate(zip(row, widths))
        )
        for row in cells
    )


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
