"""The supervisor with real processes: what dies comes back, what should end ends, nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from app.launch import supervisor
from app.launch.supervisor import Program, StartFailed, Supervisor
from tests.processes import alive, marked, until

ROOT = Path(__file__).parents[2]
STUBBORN = ROOT / "tests" / "integration" / "stubborn.py"


class Nest:
    """A supervisor whose processes carry a mark in their environment, so that a test can find all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"NEST={folder}"
        self.supervisor = Supervisor()

    def start(self, *words: str, name: str = "child", **how: Any) -> supervisor.Child:
        program = Program(
            name,
            [sys.executable, str(STUBBORN), *words],
            {**os.environ, "NEST": str(self.folder)},
            self.folder / f"{name}.log",
            **how,
        )
        return self.supervisor.start(program)

    def log(self, name: str = "child") -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def waits(self, count: int = 1, name: str = "child") -> None:
        until(lambda: self.log(name).count("waiting") == count, f"{count} processes of {name} wait")


@pytest.fixture
def nest(tmp_path: Path) -> Iterator[Nest]:
    nest = Nest(tmp_path)
    yield nest
    nest.supervisor.stop(lambda: True)
    until(lambda: marked(nest.mark) == [], "nothing is left")


def ticks(nest: Nest, holds: Callable[[], object], what: str) -> None:
    def turn() -> bool:
        nest.supervisor.tick()
        return bool(holds())

    until(turn, what)


def test_what_dies_is_started_again(nest: Nest, caplog: pytest.LogCaptureFixture) -> None:
    child = nest.start("spawn", "wait")
    nest.waits(2)
    first = marked(nest.mark)
    assert child.process is not None
    child.process.kill()
    ticks(nest, lambda: nest.log().count("waiting") == 4, "it and its child are there again")
    until(lambda: not [pid for pid in first if alive(pid)], "the first two are gone")
    assert "died program=child how='was ended by SIGKILL' restart_in_s=0.500" in caplog.text


def test_what_cannot_be_started_is_tried_again(nest: Nest, caplog: pytest.LogCaptureFixture) -> None:
    command = nest.folder / "command"
    command.symlink_to(sys.executable)
    program = Program(
        "child", [str(command), str(STUBBORN), "wait"], dict(os.environ), nest.folder / "child.log"
    )
    child = nest.supervisor.start(program)
    nest.waits()
    command.unlink()
    assert child.process is not None
    child.process.kill()
    ticks(nest, lambda: "start_failed program=child" in caplog.text, "it cannot be started")
    command.symlink_to(sys.executable)
    ticks(nest, lambda: nest.log().count("waiting") == 2, "it is there again")


def test_a_log_that_grows_long_begins_anew(nest: Nest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "MOST_LOG_BYTES", 10)
    script = "trap 'echo more' TERM; echo 0123456789; while :; do sleep 0.05; done"
    log = nest.folder / "child.log"
    child = nest.supervisor.start(
        Program("child", ["bash", "-c", script], {**os.environ, "NEST": str(nest.folder)}, log, grace_s=0.1)
    )
    ticks(nest, lambda: (nest.folder / "child.log.old").exists(), "what it wrote is the old log")
    assert (nest.folder / "child.log.old").read_text() == "0123456789\n"
    child.ask_to_stop()
    until(lambda: nest.log() == "more\n", "it writes to the new one")


def test_a_full_disk_gets_the_space_of_a_long_log(nest: Nest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "MOST_LOG_BYTES", 5)
    monkeypatch.setattr(supervisor.shutil, "copyfile", Mock(side_effect=OSError))
    (nest.folder / "child.log.old").write_text("of before")
    nest.start("wait")
    nest.waits()
    nest.supervisor.tick()
    assert nest.log() == ""
    assert not (nest.folder / "child.log.old").exists()


def test_a_log_may_be_taken_away_at_any_moment(nest: Nest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "MOST_LOG_BYTES", 5)
    monkeypatch.setattr(supervisor.shutil, "copyfile", lambda log, old: log.rename(old))
    child = nest.start("wait")
    nest.waits()
    nest.supervisor.tick()
    assert not (nest.folder / "child.log").exists()
    nest.supervisor.tick()
    assert child.ended() is None


def test_failures_in_a_row_wait_longer_each_time(nest: Nest) -> None:
    child = nest.start("print", "again", "exit", "1")
    ticks(nest, lambda: nest.log().count("again") == 3, "it was started twice more")
    assert child.failures >= 2
    started = time.monotonic()
    ticks(nest, lambda: nest.log().count("again") == 4, "and again")
    assert time.monotonic() - started > supervisor.backoff_s(2)


def test_a_program_that_ends_while_starting_is_told_with_its_last_words(nest: Nest) -> None:
    nest.start("print", "the model is unusable", "exit", "78")
    nest.start("wait", name="other")
    with pytest.raises(StartFailed) as caught:
        until(lambda: nest.supervisor.check(), "the check fails")
    assert "child exited with status 78 while starting" in str(caught.value)
    assert "the model is unusable" in str(caught.value)


def test_stop_asks_waits_and_kills_the_rest(nest: Nest) -> None:
    notes = nest.folder / "notes"
    nest.start("note", "polite", "1", str(notes), "wait", name="polite")
    nest.start("ignore", "spawn", "wait", name="stubborn", grace_s=0.3)
    nest.waits(name="polite")
    nest.waits(2, name="stubborn")
    began = time.monotonic()
    nest.supervisor.stop(lambda: False)
    assert time.monotonic() - began >= 0.3
    assert notes.read_text() == "polite ended at 1\n"


def test_a_hurried_stop_asks_twice(nest: Nest) -> None:
    notes = nest.folder / "notes"
    nest.start("note", "busy", "2", str(notes), "wait", grace_s=60.0)
    nest.waits()
    began = time.monotonic()
    nest.supervisor.stop(lambda: time.monotonic() - began > 0.2)
    assert notes.read_text() == "busy ended at 2\n"


def test_what_the_others_need_stops_after_them(nest: Nest) -> None:
    notes = nest.folder / "notes"
    nest.start("note", "needed", "1", str(notes), "wait", name="needed", needed=True)
    nest.start("note", "user", "2", str(notes), "wait", name="user", grace_s=60.0)
    nest.waits(name="needed")
    nest.waits(name="user")
    began = time.monotonic()
    nest.supervisor.stop(lambda: time.monotonic() - began > 0.2)
    assert notes.read_text() == "user ended at 2\nneeded ended at 1\n"


def test_a_child_runs_on_its_cores(nest: Nest) -> None:
    core = max(os.sched_getaffinity(0))
    child = nest.start("wait", cores=frozenset({core}))
    nest.waits()
    assert child.process is not None
    assert os.sched_getaffinity(child.process.pid) == {core}


def test_a_killed_launcher_leaves_nothing_behind(tmp_path: Path) -> None:
    code = f"""
import time
from pathlib import Path
from tests.integration.test_supervisor import Nest
nest = Nest(Path({str(tmp_path)!r}))
for i in range(3):
    nest.start("ignore", "wait", name=f"child-{{i}}")
while True:
    nest.supervisor.tick()
    time.sleep(0.05)
"""
    launcher = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    until(lambda: len(marked(f"NEST={tmp_path}")) == 3, "three children run")
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    until(lambda: marked(f"NEST={tmp_path}") == [], "the children are gone")
