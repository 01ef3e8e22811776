"""Whose death can be proven from here, and for how long."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.life_lock import ALIVE_S, KEEP_S, LifeLock, is_free, sweep
from relay.worker_card import Incarnation, host_identity
from tests.integration.until import until

OTHER, MINE = "decode-0123456789abcdef", "prefill-0123456789abcdef"
ELSEWHERE = f"{host_identity().partition('/')[0]}/pid:[1]"  # another container of this machine


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of a worker, as one in another container does."""
    script = f"""
        from relay.life_lock import LifeLock
        lock = LifeLock({str(tmp_path)!r}, {OTHER!r})
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
    incarnation = Incarnation.here(OTHER, other.stdout.readline().strip())._replace(host=ELSEWHERE)
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


def dead(folder: Path, boot: str) -> Path:
    """The file of a worker that has ended."""
    path = folder / boot
    path.touch()
    os.utime(path, (ALIVE_S, ALIVE_S))
    return path


def test_a_proof_of_death_stays_as_long_as_anybody_may_ask(tmp_path: Path) -> None:
    path = dead(tmp_path, OTHER)
    for now in (1e9, 1e9 + KEEP_S / 2, 1e9 + KEEP_S):
        sweep(str(tmp_path), now)
        assert is_free(str(path))
    sweep(str(tmp_path), 1e9 + KEEP_S + 1)
    assert not path.exists()


def test_who_lives_long_is_no_older_when_it_dies(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    assert other.stdout is not None
    path = Path(other.stdout.readline().strip())
    for now in (1e9, 1e9 + 9 * KEEP_S):
        sweep(str(tmp_path), now)
        assert path.stat().st_mtime == ALIVE_S
    other.kill()
    until(lambda: is_free(str(path)), "the lock is free")
    for now in (2e9, 2e9 + KEEP_S):
        sweep(str(tmp_path), now)
        assert path.exists()
    sweep(str(tmp_path), 2e9 + KEEP_S + 1)
    assert not path.exists()


def test_a_start_sweeps_for_those_before(tmp_path: Path) -> None:
    path = dead(tmp_path, OTHER)
    LifeLock(str(tmp_path), MINE)
    assert path.stat().st_mtime != ALIVE_S
    os.utime(path, (1.0, 1.0))
    lock = LifeLock(str(tmp_path), "unified-0123456789abcdef")
    assert not path.exists()
    assert not is_free(lock.path)


def test_what_no_worker_made_is_not_swept(tmp_path: Path) -> None:
    for name in ("notes", f"{OTHER}.txt", "worker-0123456789abcdef"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1.0, 1.0))
    (tmp_path / MINE).mkdir()
    sweep(str(tmp_path), 1e9)
    assert len(list(tmp_path.iterdir())) == 4


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
