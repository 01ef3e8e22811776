"""Wait for what another process or the clock does, with a deadline instead of a sleep."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(holds: Callable[[], T], what: str, deadline_s: float = 20.0) -> T:
    """Poll until `holds` returns something true, and return that."""
    deadline = time.monotonic() + deadline_s
    while not (value := holds()):
        assert time.monotonic() < deadline, f"not within {deadline_s} s: {what}"
        time.sleep(0.01)
    return value
