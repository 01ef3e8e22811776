"""How tests wait for processes and find them."""

import contextlib
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
    return [pid for pid in _pids() if mark.encode() in _read(pid, "environ").split(b"\0") and alive(pid)]


def inside(folder: Path) -> list[int]:
    """The living processes whose working directory is `folder`: Valkey writes over its environment."""
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cwd").readlink() == folder and alive(pid):
                found.append(pid)
    return found


def _pids() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
