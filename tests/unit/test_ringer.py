"""Doorbells leave on a thread of their own: in order, whatever the broker does."""

import threading

import pytest

from relay.request import Leg, Ring
from workers.ringer import Ringer

DEADLINE_S = 10.0
BELLS = [Ring(Leg.PREFILL, f"req_{number}") for number in range(3)]


def test_what_is_queued_is_sent_before_it_ends() -> None:
    sent: list[Ring] = []
    ringer = Ringer(sent.append)
    for bell in BELLS:
        ringer.ring(bell)
    ringer.stop(DEADLINE_S)
    assert sent == BELLS


def test_a_bell_that_cannot_be_sent_is_dropped_and_the_next_one_goes_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent: list[Ring] = []

    def send(bell: Ring) -> None:
        if bell == BELLS[1]:
            raise OSError("no broker")
        sent.append(bell)

    ringer = Ringer(send)
    for bell in BELLS:
        ringer.ring(bell)
    ringer.stop(DEADLINE_S)
    assert sent == [BELLS[0], BELLS[2]]
    assert "ring_failed request=req_1" in caplog.text


def test_what_a_long_outage_would_pile_up_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.ringer.MOST_BELLS", 2)
    sending, hangs, sent = threading.Event(), threading.Event(), list[Ring]()

    def send(bell: Ring) -> None:
        sending.set()
        assert hangs.wait(DEADLINE_S)
        sent.append(bell)

    ringer = Ringer(send)
    ringer.ring(BELLS[0])
    assert sending.wait(DEADLINE_S)
    for bell in (*BELLS[1:], BELLS[0], BELLS[0]):
        ringer.ring(bell)
    hangs.set()
    ringer.stop(DEADLINE_S)
    assert sent == BELLS


def test_nobody_waits_for_a_broker_that_hangs() -> None:
    hangs, sent = threading.Event(), list[Ring]()

    def send(bell: Ring) -> None:
        assert hangs.wait(DEADLINE_S)
        sent.append(bell)

    ringer = Ringer(send)
    for bell in BELLS:
        ringer.ring(bell)
    ringer.stop(timeout_s=0.0)
    assert sent == []
    hangs.set()
    ringer.stop(DEADLINE_S)
    assert sent == BELLS
