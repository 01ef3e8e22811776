"""Processes that are kept running: each in a group of its own, restarted when it dies, never left behind."""

import contextlib
import ctypes
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from relay.log import event

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
STEADY_S = 60.0  # who ran this long has not failed in a row
HURRY_S = 5.0  # between the second SIGTERM, at which a worker hands back what it runs, and SIGKILL
POLL_S = 0.05
MOST_LOG_BYTES = 64 << 20  # of a program; as much again is kept beside it

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Program(NamedTuple):
    """What to run. `cores` None: on any. `grace_s`: between asking it to stop and killing it.

    A program that the others need (`needed`) stops after them.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    log_path: Path
    cores: frozenset[int] | None = None
    grace_s: float = 10.0
    needed: bool = False


class StartFailed(Exception):
    """A program ended while it was starting; the message holds the last lines it logged."""


def backoff_s(failures: int) -> float:
    """How long to wait before start number `failures` + 1 in a row."""
    return min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (failures - 1)) if failures else 0.0


def die_with_parent(parent: int) -> None:
    """In a new process: be killed when the process `parent`, which started it, is gone, however that ends."""
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0 or os.getppid() != parent:
        os._exit(1)


class Child:
    """One program, and the process that runs it now."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.failures = 0
        self.started = 0.0
        self.start_at = 0.0
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        program, parent = self.program, os.getpid()

        def prepare() -> None:
            die_with_parent(parent)
            if program.cores is not None:
                os.sched_setaffinity(0, program.cores)

        with program.log_path.open("ab") as output:
            self.process = subprocess.Popen(
                program.command,
                env=dict(program.env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=prepare,
            )
        self.started = time.monotonic()

    def trim_log(self) -> None:
        """Keep a log that has grown long as the old one; the program goes on where the file then ends."""
        path = self.program.log_path
        with contextlib.suppress(FileNotFoundError):  # somebody took it away
            if path.stat().st_size <= MOST_LOG_BYTES:
                return
            try:
                shutil.copyfile(path, old_log(path))
            except OSError:  # a full disk gets its space back
                old_log(path).unlink(missing_ok=True)
            os.truncate(path, 0)

    def ended(self) -> int | None:
        """The exit status of the process, None while it runs."""
        return self.process.poll() if self.process else None

    def ask_to_stop(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.terminate()

    def kill(self) -> None:
        """Kill the whole group, also what a process that has ended left in it."""
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Supervisor:
    """Keeps children running. One thread makes all calls: a child dies with the thread that started it."""

    def __init__(self) -> None:
        self.children: list[Child] = []

    def start(self, program: Program) -> Child:
        child = Child(program)
        self.children.append(child)
        child.start()
        return child

    def check(self) -> None:
        """While things start: raises StartFailed for the first program that has ended."""
        for child in self.children:
            status = child.ended()
            if status is not None:
                name, path = child.program.name, child.program.log_path
                tail = last_lines(path)
                raise StartFailed(f"{name} {_how(status)} while starting.\n{tail}\nIts log: {path}")

    def tick(self) -> None:
        """Restart what has died, each after its backoff, and keep logs short."""
        now = time.monotonic()
        for child in self.children:
            status = child.ended()
            if status is not None:
                child.kill()
                child.failures = 1 if now - child.started > STEADY_S else child.failures + 1
                wait_s = backoff_s(child.failures)
                child.process, child.start_at = None, now + wait_s
                how = _how(status)
                event(log, "died", logging.WARNING, program=child.program.name, how=how, restart_in_s=wait_s)
            if child.process is None and now >= child.start_at:
                self._start_again(child, now)
            child.trim_log()

    def _start_again(self, child: Child, now: float) -> None:
        name = child.program.name
        try:
            child.start()
        except (OSError, subprocess.SubprocessError) as error:  # as where memory or process ids have run out
            child.failures += 1
            child.start_at = now + (wait_s := backoff_s(child.failures))
            event(log, "start_failed", logging.WARNING, program=name, error=error, again_in_s=wait_s)
        else:
            event(log, "started", program=name, pid=child.process and child.process.pid)

    def stop(self, hurried: Callable[[], bool]) -> None:
        """End all children, each within its grace period, then those that the others needed.

        `hurried` cuts the grace period short when it returns true: SIGTERM again, and a moment later SIGKILL.
        """
        for needed in (False, True):
            self._end([child for child in self.children if child.program.needed is needed], hurried)
        self.children.clear()

    def _end(self, children: Sequence[Child], hurried: Callable[[], bool]) -> None:
        asked = time.monotonic()
        hurried_at: float | None = None
        for child in children:
            child.ask_to_stop()
        while running := [child for child in children if child.process and child.ended() is None]:
            now = time.monotonic()
            if hurried_at is None and hurried():
                hurried_at = now
                for child in running:
                    child.ask_to_stop()
            for child in running:
                late = now - asked > child.program.grace_s
                if late or (hurried_at is not None and now - hurried_at > HURRY_S):
                    child.kill()
            time.sleep(POLL_S)
        for child in children:
            child.kill()


def old_log(path: Path) -> Path:
    """Where what was in this log before is kept."""
    return path.with_suffix(".log.old")


def last_lines(path: Path, count: int = 5) -> str:
    """The end of a log, for a message."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n".join(f"  {line}" for line in lines[-count:])


def _how(status: int) -> str:
    return f"exited with status {status}" if status >= 0 else f"was ended by {signal.Signals(-status).name}"
