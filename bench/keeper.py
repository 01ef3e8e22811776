"""`python -m bench.keeper COMMAND...`: runs a command; ends all of it when whoever holds our stdin is gone.

A benchmark that is killed cannot stop what it started; the end of a pipe is something that always comes.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

GRACE_S = 20.0
POLL_S = 0.1


def main(command: list[str]) -> int:
    """Until the command ends, or stdin does. The exit status of the command."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    while child.poll() is None and not select.select([sys.stdin], [], [], POLL_S)[0]:
        pass
    _signal(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    _signal(child.pid, signal.SIGKILL)
    return child.wait()


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
