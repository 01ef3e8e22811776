"""From `kvrelay up` to its first answer, by what its processes log: where the time goes."""

import time
from datetime import datetime

from app.measure.table import show
from bench.system import System

GOAL_S = 20.0
EVENTS = (  # the last process to log it ends the part
    ("checks, Valkey, imports of the workers", " loading "),
    ("weights, tokenizer, KV pool, first steps", " loaded "),
    ("NIXL, registration", " ready worker="),
    ("gateway's view, Flower", " submitted "),
    ("first answer", " finished "),
)


def run() -> None:
    start = time.time()
    with System(LOG_LEVEL="INFO") as system:
        total_s = time.time() - start
        lines = [line for path in system.logs.glob("*.log") for line in path.read_text().splitlines()]
    rows, before = [], start
    for part, words in EVENTS:
        at = max(_seconds(line) for line in lines if words in line)
        rows.append((part, at - before, at - start))
        before = at
    show(
        f"kvrelay up, default model: {total_s:.1f} s until it says so (goal: {GOAL_S:.0f})",
        ("part", "s", "until"),
        rows,
    )


def _seconds(line: str) -> float:
    """When a line was logged, since the epoch."""
    return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()
