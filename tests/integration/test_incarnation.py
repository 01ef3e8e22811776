"""Whose death can be proven from here."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.life_lock import LifeLock
from relay.worker_card import Incarnation, host_identity
from tests.integration.until import until

ELSEWHERE = f"{host_identity().partition('/')[0]}/pid:[1]"  # another container of this machine


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of a worker, as one in another container does."""
    script = f"""
        from relay.life_lock import LifeLock
        lock = LifeLock({str(tmp_path)!r}, "other")
        print(lock.path, flush=True)
        input()
    """
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.kill()


def test_a_lock_tells_of_a_death_in_another_container(other: subprocess.Popen[str]) -> None:
    assert other.stdout is not None
    incarnation = Incarnation.here("other", other.stdout.readline().strip())._replace(host=ELSEWHERE)
    assert not incarnation.proven_dead()
    other.kill()
    until(incarnation.proven_dead, "the lock is free")


def test_a_lock_says_nothing_about_another_machine(tmp_path: Path) -> None:
    free = tmp_path / "other"
    free.touch()
    on_this = Incarnation("other", ELSEWHERE, 1, 1, str(free))
    assert on_this.proven_dead()
    assert not on_this._replace(host="another/pid:[1]").proven_dead()
    assert not on_this._replace(lock=str(tmp_path / "not mounted here")).proven_dead()
    assert not on_this._replace(lock="").proven_dead()


def test_a_worker_does_not_find_its_own_lock_free(tmp_path: Path) -> None:
    lock = LifeLock(str(tmp_path), "here")
    assert not Incarnation("here", ELSEWHERE, 1, 1, lock.path).proven_dead()


def test_a_process_that_proc_hides_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Incarnation.here("mine")
    assert not mine.proven_dead()

    def hidden(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", hidden)
    monkeypatch.setattr("relay.worker_card.host_identity", lambda: mine.host)
    assert not mine.proven_dead()
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True)
    assert mine._replace(pid=int(gone.stdout)).proven_dead()
