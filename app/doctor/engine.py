"""What a worker would find here. Only a process of its own may import torch."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from app.doctor.finding import Finding, fail, ok, warn
from relay.settings import Settings

_LONGEST_S = 120  # a first import of torch from a slow disk


def check_engine(_: Settings) -> Iterator[Finding]:
    command = [sys.executable, "-m", "workers.machine"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_S)
        found = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        yield fail(
            "engine",
            f"torch and NIXL did not start in {_LONGEST_S} s",
            "look for a slow disk, or a GPU that hangs",
        )
    except (ValueError, IndexError):
        last = done.stderr.strip().splitlines()[-1:] or [f"it ended with status {done.returncode}"]
        yield fail("engine", f"torch and NIXL do not start: {last[0]}", "install again: make install")
    else:
        yield from judge_engine(found)


def judge_engine(found: Mapping[str, Any]) -> Iterator[Finding]:
    """`found`: what `workers.machine` tells."""
    python = f"Python {found['python']}, torch {found['torch']}"
    if "error" in found:
        what, _, todo = found["error"].partition(": ")
        yield fail("engine", f"{python}: {what}", todo or "correct DEVICE and KERNELS")
    elif found["device"] == "cuda":
        yield ok("engine", f"{python}, CUDA {found['cuda']}: {found['gpu']}, {found['gpu_bytes'] >> 20} MiB")
        if found["kernels"] == "flashinfer" and found["compiles"]:
            yield ok("kernels", f"FlashInfer {found['flashinfer']}")
        elif found["kernels"] == "flashinfer":
            what = f"FlashInfer {found['flashinfer']}, and no nvcc that compiles them"
            yield warn("kernels", what, "install CUDA's nvcc 13, or run the image, which has them compiled")
        else:
            yield warn(
                "kernels", "plain torch, which is slow", "pip install 'kvrelay[gpu]', and KERNELS=auto"
            )
    else:
        yield ok("engine", f"{python}, on the CPU")
        if found["kernels"] == "cpu" and found["isa"] != "baseline":
            yield ok("kernels", f"C++, {found['isa']}")
        else:
            todo = "KERNELS=auto on a CPU that has AVX2, with the kernels built: make install"
            yield warn("kernels", "plain torch or plain C++, which is slow", todo)
    nixl = found["nixl"]
    if "error" in nixl:
        what, _, todo = nixl["error"].partition(". ")
        yield fail("NIXL", what, todo or "install it: pip install nixl-cu13")
    else:
        yield ok("NIXL", f"{nixl['package']} {nixl['version']}, an agent with UCX starts")
