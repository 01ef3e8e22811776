"""What this machine can do right now: the controls that results are divided by."""

import os
import platform
from pathlib import Path
from typing import NamedTuple

import torch


class Controls(NamedTuple):
    """The fastest of several ways to read 256 MiB in huge pages, and bfloat16 products within registers."""

    threads: int
    read_gb_s: float
    bf16_gflop_s: float


def name() -> str:
    models = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    ]
    cpu = models[0].split(":")[1].strip() if models else platform.machine()
    return f"{cpu}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}"


def controls(threads: int | None = None, repeats: int = 3) -> Controls:
    """`threads` is by default torch's number. Needs the C++ kernels."""
    from kernels import _native  # a machine that is here for its GPU has none

    threads = threads or torch.get_num_threads()
    isa = _native.usable_isas()[0]
    machine = _native.Machine(_native.Dtype.bfloat16, isa, _native.ThreadPool(threads))
    return Controls(
        threads, machine.read_rate(256 << 20, repeats) / 1e9, machine.multiply_rate(repeats) / 1e9
    )
