"""The parts in which the whole suite runs."""

from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.suite import COMPUTES, COMPUTING, TIMED, WAITS

ROOT = Path(__file__).parents[2]
FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))


@pytest.mark.parametrize("file", FILES)
def test_each_file_runs_once(file: str) -> None:
    computes = sum(file == part or file.startswith(f"{part}/") for part in COMPUTES)
    waits = file.startswith(f"{WAITS[0]}/") and not any(fnmatch(file, glob) for glob in COMPUTING)
    timed = sum(file.startswith(f"{part}/") for part in TIMED)
    assert computes + waits + timed == 1
