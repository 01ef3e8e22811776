"""Python reads this first where PYTHONPATH leads here. Everything is counted for Prometheus as often
as the byte in the file BENCH_SEEN says, and each trace is exported BENCH_TIMES times."""

import mmap
import os
import sys
from typing import Any

from prometheus_client import Counter, Histogram


def _repeat(kind: type, name: str, times: Any) -> None:
    once = getattr(kind, name)

    def repeated(self: Any, *args: Any, **more: Any) -> Any:
        done = None
        for _ in range(times[0]):
            done = once(self, *args, **more)
        return done

    setattr(kind, name, repeated)


if path := os.environ.get("BENCH_SEEN"):
    with open(path, "r+b") as file:
        byte = mmap.mmap(file.fileno(), 1)
    _repeat(Counter, "inc", byte)
    _repeat(Histogram, "observe", byte)
    if "gunicorn" in sys.orig_argv:
        from app.tracing.trace_export import TraceExport

        _repeat(TraceExport, "_exported", [int(os.environ["BENCH_TIMES"])])
