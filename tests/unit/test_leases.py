"""Renewal: what the answer says reaches the legs, and posts follow the leases."""

import math
import time

import pytest
from redis.exceptions import ConnectionError

from relay.answers import Kept, Lost, Renewed, RoomState
from relay.request import Hold, Leg, Ring, State
from relay.worker_card import Load, WorkerCard
from tests.desk import RecordingDesk, card, claimed
from tests.unit.test_claims import NoLegs
from workers.engine.messages import Heartbeat
from workers.leases import LEASE_MARGIN_S, RENEW_EVERY_S, STUCK_S, EngineStuck, Leases

LOAD = Load(4, 1600, 0, 0, 100, 0, 0, 0)
HOLD = claimed(Leg.PREFILL).hold
NOTHING = Renewed(known=True, epoch=b"1", kept=[], lost=[], rings=[], workers=[])


class HeldLegs(NoLegs):
    def __init__(self, desk: RecordingDesk) -> None:
        super().__init__()
        self.desk = desk
        self.heard: list[object] = []

    def holds(self) -> list[Hold]:
        return [HOLD]

    def on_lost(self, hold: Hold, why: str) -> None:
        assert self.desk.kv.deadline_s == math.inf, "a leg closes before posts may go on"
        self.heard.append((hold, why))

    def on_renewed(self, kept: Kept) -> None:
        self.heard.append(kept)


class Worker:
    def __init__(self) -> None:
        self.desk = RecordingDesk()
        self.server = self.desk.server
        self.legs = HeldLegs(self.desk)
        self.heartbeat = Heartbeat(1, None)
        self.leases = Leases(self.desk, self.legs, lambda: self.heartbeat, lambda: LOAD, self.card)

    def card(self, load: Load) -> WorkerCard:
        return card("here")

    def renew(self, answer: object) -> None:
        self.server.replies["renew"] = answer
        self.leases.renew()
        self.desk.flush()


def test_every_leg_is_listed_and_the_next_renewal_is_a_second_later() -> None:
    worker = Worker()
    before = time.monotonic()
    worker.renew(NOTHING)
    assert worker.server.called == [("renew", ("here", LOAD, [HOLD], 3000, {}))]
    assert before + RENEW_EVERY_S <= worker.leases.due_at <= time.monotonic() + RENEW_EVERY_S


def test_the_answer_reaches_the_legs_and_the_ringer() -> None:
    worker = Worker()
    kept, ring = Kept(HOLD, State.PREFILL, RoomState.OPEN), Ring(Leg.DECODE, "req_9")
    worker.renew(NOTHING._replace(kept=[kept], lost=[Lost(HOLD, "expired")], rings=[ring]))
    assert worker.legs.heard == [(HOLD, "expired"), kept]
    assert worker.desk.rung == [ring]


def test_posts_end_before_the_lease_does() -> None:
    worker = Worker()
    before = time.monotonic()
    worker.renew(NOTHING)
    lease_s = 3.0 - LEASE_MARGIN_S
    assert before + lease_s <= worker.desk.kv.deadline_s <= time.monotonic() + lease_s


def test_an_outage_prolongs_nothing() -> None:
    worker = Worker()
    worker.renew(ConnectionError("nobody listens"))
    assert worker.desk.kv.deadline_s == math.inf
    assert worker.leases.due_at > time.monotonic()


def test_a_stuck_engine_renews_nothing() -> None:
    worker = Worker()
    worker.heartbeat = Heartbeat(7, time.monotonic() - 1)
    worker.renew(NOTHING)
    assert worker.server.called == []
    worker.heartbeat = Heartbeat(8, time.monotonic() + 60)
    worker.renew(NOTHING)
    assert worker.server.names() == ["renew"]


def test_an_engine_that_stays_stuck_ends_its_process() -> None:
    worker = Worker()
    worker.heartbeat = Heartbeat(7, time.monotonic() - STUCK_S - 1)
    with pytest.raises(EngineStuck, match="step 7"):
        worker.renew(NOTHING)


def test_a_worker_that_the_server_forgot_registers_again() -> None:
    worker = Worker()
    worker.renew(NOTHING._replace(known=False))
    assert worker.server.names() == ["renew", "register"]


def test_an_unexpected_error_is_a_crash_and_not_silence() -> None:
    with pytest.raises(ValueError, match="a bug"):
        Worker().renew(ValueError("a bug"))


def test_who_lives_is_met_with_each_renewal() -> None:
    worker = Worker()
    worker.renew(NOTHING._replace(workers=["here", "D"]))
    assert worker.desk.met == ["here", "D"]
