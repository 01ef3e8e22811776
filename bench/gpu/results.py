"""What the parts of a GPU run measured, as one JSON file per part, and the table made of them.

python -m bench.gpu.results FOLDER
"""

import argparse
import json
import sys
from pathlib import Path
from typing import NamedTuple

from app.measure.table import show


class Row(NamedTuple):
    """`goal` says what `share` of the limit named beside it was aimed at, such as ">= 0.8 of copy"."""

    what: str
    value: float
    unit: str
    share: float | None = None
    goal: str = ""


class Results:
    """Rows of one part, on disk as soon as they are known: a part that is killed leaves what it had."""

    def __init__(self, folder: Path, part: str) -> None:
        self._file = folder / f"{part}.json"
        self._rows: list[Row] = []

    def add(self, what: str, value: float, unit: str, share: float | None = None, goal: str = "") -> None:
        row = Row(what, value, unit, share, goal)
        self._rows.append(row)
        self._file.write_text(json.dumps([row._asdict() for row in self._rows], indent=1))
        print(*row, flush=True)


def read(folder: Path, part: str) -> list[Row]:
    file = folder / f"{part}.json"
    return [Row(**row) for row in json.loads(file.read_text())] if file.exists() else []


def limit(folder: Path, what: str) -> float:
    """What `bench.gpu.limits` measured; nan when it did not."""
    return next((row.value for row in read(folder, "limits") if row.what == what), float("nan"))


def arguments(description: str | None) -> argparse.Namespace:
    """`device` and `out` of a part. On a CPU every part is shortened: it only shows that it runs."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    folder = Path(sys.argv[1])
    parts = ("limits", "steps", "transfer", "relay")
    rows = [(part, *row) for part in parts for row in read(folder, part)]
    cells = [
        (part, what, value, unit, "" if share is None else f"{share:.0%}", goal)
        for part, what, value, unit, share, goal in rows
    ]
    show("GPU run", ("part", "what", "value", "unit", "share", "goal"), cells)
    if missing := [part for part in parts if not read(folder, part)]:
        print(f"\nno results of: {', '.join(missing)} (see the logs in {folder})")


if __name__ == "__main__":
    main()
