"""python -m bench.gpu.limited SECONDS COMMAND...: run a command for so long at most, leaving nothing behind.

What a part of a GPU run started would hold the device's memory, and disturb what the next part measures.
"""

import contextlib
import ctypes
import signal
import subprocess
import sys

import psutil

TIMED_OUT = 124
GRACE_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36


def run(command: list[str], limit_s: float) -> int:
    """The exit status of the command; TIMED_OUT when it was ended."""
    # Whose parent is gone becomes our child, so that no descendant is out of sight.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = subprocess.Popen(command)
    try:
        return child.wait(limit_s)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
        return TIMED_OUT
    finally:
        end_descendants()


def end_descendants() -> None:
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=GRACE_S)


if __name__ == "__main__":
    sys.exit(run(sys.argv[2:], float(sys.argv[1])))
