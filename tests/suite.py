"""`python -m tests.suite`: every test. What computes runs beside what waits; what is timed runs alone.

Each part is a pytest of its own, and so has its own servers, ports, folders and model names.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import pytest

# Of tests/integration, what hardly waits: Redis alone, or the CPU.
COMPUTING = tuple(f"tests/integration/test_{name}.py" for name in ("rooms*", "api_*", "clients", "doctor"))
COMPUTES = ("tests/unit", "tests/gpu", *sorted(str(path) for glob in COMPUTING for path in Path().glob(glob)))
WAITS = ("tests/integration", *(f"--ignore-glob={glob}" for glob in COMPUTING))
TIMED = ("tests/hosts", "tests/chaos")
# What computes leaves a core to the others when they want one: they hold deadlines. Its sums are tiny, and
# several threads of torch would mostly wait for each other.
BESIDE = ("nice", "-n", "10", "env", "OMP_NUM_THREADS=1")


def main() -> int:
    """0: every test passed. The last lines name those that did not."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # each pytest has it too, ends in order, and says so
    began = time.monotonic()
    with tempfile.TemporaryFile() as kept:
        computes = start(COMPUTES, kept, BESIDE)
        waits = start(WAITS, subprocess.PIPE)
        lost = shown(waits.stdout)
        statuses = [waits.wait(), computes.wait()]
        kept.seek(0)
        lost += shown(kept)
    if pytest.ExitCode.INTERRUPTED not in statuses:
        timed = start(TIMED, subprocess.PIPE)
        lost += shown(timed.stdout)
        statuses.append(timed.wait())
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    print(f"{minutes} min {seconds} s; pytest ended with {statuses}", *lost, sep="\n")
    return int(any(statuses))


def start(
    tests: Sequence[str], output: "int | IO[bytes]", before: Sequence[str] = ()
) -> "subprocess.Popen[bytes]":
    command = [*before, sys.executable, "-m", "pytest", *tests]
    return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


def shown(output: IO[bytes] | None) -> list[str]:
    """Print it as it comes; its lines that name a test that failed."""
    assert output
    lost, line = [], b""
    while part := os.read(output.fileno(), 1 << 16):
        sys.stdout.buffer.write(part)
        sys.stdout.buffer.flush()
        *lines, line = (line + part).split(b"\n")
        lost += [each.decode() for each in lines if each.startswith((b"FAILED ", b"ERROR "))]
    return lost


if __name__ == "__main__":
    sys.exit(main())
