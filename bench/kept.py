"""A command that never outlives the benchmark that started it."""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from bench.keeper import GRACE_S

POLL_S = 0.2


class NotStarted(RuntimeError):
    """The message holds the end of the command's log."""


class Kept:
    """Runs from here on, under a keeper; its output goes to `log`."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self._log = log
        keeper = [sys.executable, str(Path(__file__).with_name("keeper.py")), *command]
        with log.open("wb") as output:
            self._keeper = subprocess.Popen(
                keeper,
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Raises NotStarted."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if self._keeper.poll() is not None or time.monotonic() > deadline:
                raise NotStarted(
                    f"{self._log.stem} did not start; {self._log} ends with:\n{self.log()[-2000:]}"
                )
            time.sleep(POLL_S)

    def processes(self) -> list[psutil.Process]:
        """The command first, then all that descends from it."""
        return list(psutil.Process(self._keeper.pid).children(recursive=True))

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def ask_to_stop(self) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()

    def stop(self) -> None:
        self.ask_to_stop()
        self._keeper.wait(GRACE_S + 10)
