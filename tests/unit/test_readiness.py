"""Whether a request could be served: how old an answer may be."""

import threading
from typing import Any

import pytest
from redis.exceptions import ConnectionError

from app.gateway.readiness import STALE_S, Readiness
from relay.worker_card import WorkerCard


class Redis:
    """Answers as it is told, and counts."""

    def __init__(self) -> None:
        self.looks = 0
        self.away = False
        self.answers = threading.Event()
        self.answers.set()

    def ping(self) -> None:
        self.looks += 1
        self.answers.wait()
        if self.away:
            raise ConnectionError


def workers() -> list[WorkerCard]:
    return []


def test_who_asks_again_waits_for_no_look() -> None:
    now = [0.0]
    probe: Any = Redis()
    readiness = Readiness(probe, workers, lambda: now[0])
    try:
        assert readiness.verdict() == (["prefill worker", "decode worker"], 0.0)
        probe.answers.clear()  # the next look hangs
        now[0] = STALE_S - 0.5
        assert readiness.verdict() == (["prefill worker", "decode worker"], 1000 * (STALE_S - 0.5))
        now[0] = STALE_S
        assert readiness.verdict().missing == ["redis"], "nobody knows any more"
    finally:
        readiness.close()
        probe.answers.set()


def test_a_look_that_fails_unexpectedly_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.gateway.readiness.LOOK_EVERY_S", 0.01)
    looks = iter([[], ValueError("a card that cannot be read")])
    seen_again = threading.Event()

    def cards() -> list[WorkerCard]:
        look = next(looks, None)
        if isinstance(look, Exception):
            raise look
        if look is None:
            seen_again.set()
        return []

    probe: Any = Redis()
    readiness = Readiness(probe, cards)
    try:
        readiness.verdict()
        assert seen_again.wait(20)
    finally:
        readiness.close()


def test_a_look_at_a_redis_that_is_away() -> None:
    probe: Any = Redis()
    probe.away = True
    readiness = Readiness(probe, workers)
    readiness.look()
    assert readiness.verdict().missing == ["redis"]
    readiness.close()
