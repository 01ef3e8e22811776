"""What this machine can do right now: the controls that results are divided by."""

import os
import platform
import time
from pathlib import Path
from typing import NamedTuple

import torch


class Controls(NamedTuple):
    """Measured with the threads torch has now: streaming read of 256 MiB, and a large bfloat16 product."""

    read_gb_s: float
    bf16_gflop_s: float


def name() -> str:
    models = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    ]
    cpu = models[0].split(":")[1].strip() if models else platform.machine()
    return f"{cpu}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}"


def controls(repeats: int = 5) -> Controls:
    data = torch.ones(64 << 20, dtype=torch.float32)
    a, b = torch.ones(1024, 2048, dtype=torch.bfloat16), torch.ones(2048, 1024, dtype=torch.bfloat16)
    read_s = min(_seconds(data.sum) for _ in range(repeats))
    product_s = min(_seconds(lambda: a @ b) for _ in range(repeats))
    return Controls(data.nbytes / read_s / 1e9, 2 * 1024 * 2048 * 1024 / product_s / 1e9)


def _seconds(run: object) -> float:
    start = time.perf_counter()
    run()  # type: ignore[operator]
    return time.perf_counter() - start
