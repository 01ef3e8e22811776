"""The thread that expires leases goes on, whatever a round of it meets, and whoever hears its bells."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import ConnectionError

from relay.answers import Reaped
from relay.functions import UnsupportedServer
from relay.request import Leg, Ring
from workers import reaper
from workers.reaper import Reaper

DEADLINE_S = 20.0
BELL = Ring(Leg.PREFILL, "req_a")


class Rooms:
    """Reaps as the test says, and then without a find."""

    def __init__(self, *rounds: Exception | Reaped) -> None:
        self._rounds = iter(rounds)
        self.went_on = threading.Event()

    def reap(self, *_: int) -> Reaped:
        found = next(self._rounds, None)
        if isinstance(found, Exception):
            raise found
        if found is None:
            self.went_on.set()
        return found or Reaped([], [], [])

    def close(self) -> None:
        pass


@contextmanager
def reaping(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(reaper, "PERIOD_S", 0.01)
    monkeypatch.setattr(reaper, "Rooms", lambda *_: rooms)
    worker: Any = SimpleNamespace()
    step = Reaper(worker)
    step.start(worker)
    try:
        yield
    finally:
        step.stop(worker)


@pytest.mark.parametrize("error", [ConnectionError("away"), UnsupportedServer("evicts"), ValueError("what?")])
def test_a_round_that_fails_is_not_the_last(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = Rooms(error)
    with reaping(rooms, monkeypatch):
        assert rooms.went_on.wait(DEADLINE_S)


def test_a_broker_that_hangs_holds_up_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    rung, hangs = threading.Event(), threading.Event()

    def ring(bell: Ring) -> None:
        rung.set()
        hangs.wait(DEADLINE_S)

    monkeypatch.setattr("relay.celery.ring", ring)
    rooms = Rooms(Reaped([BELL], [], []))
    with reaping(rooms, monkeypatch):
        assert rung.wait(DEADLINE_S)
        assert rooms.went_on.wait(DEADLINE_S / 2), "the next round, while the bell is still on its way"
        hangs.set()
