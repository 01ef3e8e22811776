"""Every way in which a prefill leg may end early, and what is left of it then: nothing."""

import random
from collections.abc import Callable

import pytest
from redis.exceptions import ResponseError

from relay.answers import Kept, PublishedPages, RoomState
from relay.mailbox import Ask
from relay.request import Claimed, State, Why
from tests.desk import GEOMETRY, STALE, card, kill
from tests.prefill_rig import (
    D_NONCE,
    ENDS,
    PAGES,
    PHASES,
    THERE,
    Worker,
    lost_by_mail,
    lost_by_renewal,
)
from workers.engine.messages import Admitted, Failed
from workers.transfer.base import SendFailed


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("end", ENDS)
def test_an_early_end_in_each_phase(phase: str, end: Callable[[Worker, Claimed], None]) -> None:
    worker = Worker()
    leg, task = worker.reach(phase)
    end(worker, leg)
    assert len(task.ends) == 1
    assert task.ends[0].startswith("ok") is ENDS[end]
    assert worker.legs.holds() == []
    if phase in {"started", "mailed"}:  # no sender yet: nothing can be in flight
        worker.assert_gone(leg)
        worker.admit(leg)  # the engine reads its Drop only now
        assert leg.room not in worker.desk.kv.senders
    else:
        assert worker.sender(leg).closed
        assert worker.desk.dropped[leg.hold.nonce] == 0, "its pages are read until it has settled"
        worker.compute(leg)
        worker.settle(leg)
    worker.assert_gone(leg)
    worker.flush()
    published = phase in {"mailed", "bootstrapped", "sealed"}
    assert ("settle", (leg.room, "D")) in worker.server.called or not published
    assert len(task.ends) == 1


def test_a_leg_that_ends_while_its_admission_is_on_the_way() -> None:
    worker = Worker()
    leg, task = worker.start()
    admitted = Admitted(leg.hold.nonce, PAGES, 0)
    worker.senders.admitted(admitted)
    lost_by_mail(worker, leg)
    worker.legs.on_engine(admitted)
    assert worker.sender(leg).closed
    worker.settle(leg)
    worker.assert_gone(leg)
    assert len(task.ends) == 1


def test_every_event_after_an_early_end_changes_nothing() -> None:
    worker = Worker()
    leg, task = worker.reach("sealed")
    lost_by_mail(worker, leg)
    for event in (worker.mail, worker.compute):
        event(leg)
    lost_by_renewal(worker, leg)
    lost_by_mail(worker, leg)
    worker.legs.hand_back()
    worker.legs.on_engine(Failed(leg.hold.nonce, "late"))
    worker.flush()
    assert worker.server.called == []
    worker.sent(leg)  # the row was DONE before the close arrived: as good as Settled
    worker.assert_gone(leg)
    worker.flush()
    assert worker.server.called == [("settle", (leg.room, "D"))]
    assert len(task.ends) == 1


def test_an_engine_that_fails_before_admission_is_heard() -> None:
    worker = Worker()
    leg, task = worker.reach("started")
    worker.legs.on_engine(Failed(leg.hold.nonce, "too long"))
    worker.flush()
    assert task.ends == ["failed: too long"]
    worker.assert_gone(leg)


def test_stale_kv_ready_tells_the_reader_that_nothing_comes() -> None:
    worker = Worker()
    worker.server.replies["kv_ready"] = STALE
    leg, task = worker.reach("sent")
    worker.flush()
    assert task.ends == ["failed: the room ended before its KV was ready"]
    worker.assert_gone(leg)
    worker.flush()
    assert worker.server.names() == ["kv_ready", "settle"]


def test_kv_ready_whose_reply_is_lost_is_said_again() -> None:
    worker = Worker()
    leg, task = worker.reach("sent")
    worker.server.lose_reply = True
    worker.flush()
    assert (worker.server.names(), task.ends) == (["kv_ready"], [])
    worker.flush()
    assert worker.server.names() == ["kv_ready", "kv_ready"]
    assert len(task.ends) == 1
    assert task.ends[0].startswith("ok")
    worker.assert_gone(leg)


def test_a_renewal_may_say_done_before_kv_ready_is_repeated() -> None:
    worker = Worker()
    leg, task = worker.reach("sent")
    worker.server.lose_reply = True
    worker.flush()
    worker.legs.on_lost(leg.hold, "done")
    assert task.ends == ["ok: done"]
    worker.settle(leg)
    worker.flush()
    worker.assert_gone(leg)
    assert len(task.ends) == 1


@pytest.mark.parametrize("call", ["kv_ready", "release", "fail"])
def test_a_call_refused_for_good_leaves_the_leg_to_the_renewal(call: str) -> None:
    worker = Worker()
    worker.server.replies[call] = ResponseError("wrong type")
    leg, task = worker.reach("sent" if call == "kv_ready" else "sealed")
    if call == "release":
        worker.legs.hand_back()
    if call == "fail":
        worker.legs.on_engine(Failed(leg.hold.nonce, "NaN"))
    worker.flush()
    assert worker.legs.holds() == [], "what is not listed goes back to its queue"
    assert len(task.ends) == 1
    worker.settle(leg)
    worker.assert_gone(leg)


def test_redis_away_in_the_middle_of_a_hand_back() -> None:
    worker = Worker()
    leg, task = worker.reach("computed")
    worker.server.away = True
    for _ in range(3):
        worker.legs.hand_back()
        worker.flush()
    worker.mail(leg)
    assert worker.sender(leg).destination is None, "it is on its way back: nothing is sent any more"
    assert worker.legs.holds() == [leg.hold], "still ours until the server has heard it"
    assert task.ends == []
    worker.server.away = False
    worker.flush()
    assert worker.server.names() == ["release"]
    worker.settle(leg)
    worker.assert_gone(leg)
    assert task.ends == ["ok: drain"]


def test_a_geometry_mismatch_fails_the_request_and_not_the_worker() -> None:
    worker = Worker()
    worker.desk.peers["D"] = card("D", geometry=GEOMETRY._replace(page_size=32))
    leg, task = worker.reach("bootstrapped")
    worker.flush()
    hold, code, message = worker.server.args("fail")
    assert (hold, code) == (leg.hold, "geometry_mismatch")
    assert "page_size" in message
    worker.settle(leg)
    worker.assert_gone(leg)
    assert len(task.ends) == 1


def test_an_unknown_peer_hands_the_leg_back() -> None:
    worker = Worker()
    leg, task = worker.reach("admitted")
    worker.mail(leg, boot="nobody")
    worker.flush()
    assert worker.server.args("release")[:2] == (leg.hold, Why.PEER)
    worker.settle(leg)
    worker.assert_gone(leg)
    assert len(task.ends) == 1


def test_a_failed_send_keeps_its_pages_until_the_peer_is_dead() -> None:
    worker = Worker()
    leg, task = worker.reach("sealed")
    worker.legs.on_transfer(SendFailed(leg.room, "REMOTE_DISCONNECT"))
    worker.flush()
    assert worker.server.args("release")[:2] == (leg.hold, Why.PEER)
    worker.legs.tick(100.0)
    assert worker.desk.dropped[leg.hold.nonce] == 0
    assert [each.pages for each in worker.legs.unproven()] == [2]
    assert not worker.legs.settled()
    worker.legs.on_mail(Ask(leg.room, "D"))
    worker.flush()
    assert "settle" not in worker.server.names(), "a write may still land there"

    next(iter(worker.legs._legs.values())).peer = kill(card("D"))
    worker.legs.tick(101.0)
    assert worker.desk.kv.forgotten == ["D"]
    worker.assert_gone(leg)
    assert len(task.ends) == 1


def test_a_failed_send_that_settles_after_all() -> None:
    worker = Worker()
    leg, _ = worker.reach("sealed")
    worker.legs.on_transfer(SendFailed(leg.room, "no memory"))
    worker.flush()
    assert worker.sender(leg).closed
    worker.settle(leg)
    worker.flush()
    worker.assert_gone(leg)
    assert worker.server.names()[-1] == "settle"


@pytest.mark.parametrize("seed", range(150))
def test_any_order_of_events_ends_every_leg_once(seed: int) -> None:
    """Whatever comes, in whatever order: once the server and the transfer have had their say nothing is
    left, every task has ended once, and pages were given up only when nothing could read them."""
    rng = random.Random(seed)
    worker = Worker()
    legs = [worker.start(number) for number in range(4)]
    admitted, computed, sent, settled = set[int](), set[int](), set[int](), set[int]()

    def admit(leg: Claimed) -> None:
        if leg.room not in admitted:
            admitted.add(leg.room)
            worker.admit(leg)

    def compute(leg: Claimed) -> None:
        if leg.room in admitted and leg.room not in computed:
            computed.add(leg.room)
            worker.compute(leg)

    def send(leg: Claimed) -> None:
        sender = worker.desk.kv.senders.get(leg.room)
        if sender and sender.sealed and not sender.closed and leg.room not in sent:
            sent.add(leg.room)
            worker.sent(leg)

    def settle(leg: Claimed) -> None:
        sender = worker.desk.kv.senders.get(leg.room)
        if sender and sender.closed and leg.room not in settled:
            settled.add(leg.room)
            worker.settle(leg)

    def send_failed(leg: Claimed) -> None:
        if leg.room in admitted and leg.room not in sent:
            worker.legs.on_transfer(SendFailed(leg.room, "lost"))

    def renewed(leg: Claimed) -> None:
        worker.server.replies["published"] = rng.choice([None, PublishedPages("D", D_NONCE, THERE, 5)])
        if leg.hold in worker.legs.holds():
            worker.legs.on_renewed(Kept(leg.hold, State.PREFILL, rng.choice(list(RoomState))))

    def mail(leg: Claimed) -> None:
        worker.mail(leg, rng.choice(["D", "D", "nobody"]))

    def lost(leg: Claimed) -> None:
        rng.choice([lost_by_mail, lost_by_renewal])(worker, leg)

    def failed(leg: Claimed) -> None:
        if leg.room not in computed:
            worker.legs.on_engine(Failed(leg.hold.nonce, "NaN"))

    def server(_: Claimed) -> None:
        worker.server.away = rng.random() < 0.3
        worker.server.lose_reply = rng.random() < 0.2
        for call in ("release", "fail", "kv_ready"):
            worker.server.replies.pop(call, None)
            if rng.random() < 0.3:
                worker.server.replies[call] = rng.choice([STALE, ResponseError("wrong type")])
        worker.flush()

    def hand_back(_: Claimed) -> None:
        rng.choice([worker.legs.hand_back, worker.legs.make_room])()

    often = [admit, compute, mail, send, settle, server, renewed]
    rare = [send_failed, lost, failed, hand_back]
    for _ in range(80):
        event = rng.choice(often if rng.random() < 0.9 else rare)
        leg, _ = rng.choice(legs)
        before = worker.desk.dropped
        event(leg)
        for other, _ in legs:
            sender = worker.desk.kv.senders.get(other.room)
            if worker.desk.dropped[other.hold.nonce] > before[other.hold.nonce] and sender:
                assert sender.closed
                assert sender.destination is None or other.room in sent | settled

    worker.server.away = worker.server.lose_reply = False
    worker.server.replies.clear()
    for leg, _ in legs:
        admit(leg)
    worker.flush()
    for hold in worker.legs.holds():
        worker.legs.on_lost(hold, "expired")
    for leg, _ in legs:
        settle(leg)
    worker.flush()
    assert worker.legs.settled()
    assert (worker.senders._rooms, worker.senders._open) == ({}, {})
    for leg, task in legs:
        assert len(task.ends) == 1, task
        assert worker.desk.dropped[leg.hold.nonce] == 1


def test_nothing_stays_behind_after_many_requests() -> None:
    worker = Worker()
    for number in range(2_000):
        leg, _ = worker.reach("sent" if number % 2 else "sealed", number=number)
        worker.flush()
        if number % 2 == 0:
            lost_by_mail(worker, leg)
            worker.settle(leg)
    worker.flush()
    assert worker.legs.settled()
    assert not worker.legs._rooms
    assert (worker.senders._rooms, worker.senders._open) == ({}, {})
    assert not worker.desk.calls
