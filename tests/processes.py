"""How tests wait for processes and find them."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE_S = 30.0


def until(holds: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Poll until `holds` returns something true; what it returned."""
    deadline = time.monotonic() + deadline_s
    while not (value := holds()):
        assert time.monotonic() < deadline, f"not within {deadline_s:g} s: {what}"
        time.sleep(0.02)
    return value


def alive(pid: int) -> bool:
    """It exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] not in "ZX"


def marked(mark: str) -> list[int]:
    """The living processes whose environment holds `mark`, a `NAME=value`."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in environment and alive(int(folder.name)):
            found.append(int(folder.name))
    return found
