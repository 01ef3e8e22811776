"""The prefill leg, event by event: the happy way in every order, and every way in which it may end."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from redis.exceptions import ResponseError

from relay.answers import Kept, PublishedPages, RoomState
from relay.mailbox import Ask, Ended, Published, Ready
from relay.request import Claimed, Leg, State, Why
from relay.stretches import Stretch
from tests.desk import GEOMETRY, STALE, RecordingDesk, Sender, Task, card, claimed, kill
from workers import calls
from workers.engine.messages import Admitted, Chunked, Computed, Failed, Prefill, Prefilled, Reserved, Sampled
from workers.prefill import PrefillLegs
from workers.senders import Senders
from workers.transfer.base import Destination, Seal, SendFailed, Sent, Settled, seal_nonce

PAGES = (3, 4)
THERE = (7, 8)
D_NONCE = "d" * 32
FIRST = Sampled(42)


@pytest.fixture(autouse=True)
def _retry_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "RETRY_S", 0.0)


class Worker:
    """The legs of a prefill worker, with what the threads around them would do."""

    def __init__(self, **settings: Any) -> None:
        self.desk = RecordingDesk(**settings)
        self.server = self.desk.server
        self.senders = Senders(self.desk.manager, layers=1, page_size=16)
        self.legs = PrefillLegs(self.desk, self.senders)

    def start(self, number: int = 1, **more: Any) -> tuple[Claimed, Task]:
        leg = claimed(Leg.PREFILL, number, **more)
        task = Task(leg.hold.request_id)
        self.legs.start(leg, task)
        return leg, task

    def admit(self, leg: Claimed, cached_tokens: int = 0) -> None:
        event = Admitted(leg.hold.nonce, PAGES, cached_tokens)
        self.senders.admitted(event)  # on the engine thread
        self.legs.on_engine(event)

    def compute(self, leg: Claimed) -> None:
        self.legs.on_engine(Prefilled(leg.hold.nonce, FIRST, (Stretch(1.0, 2.0, 20),)))

    def mail(self, leg: Claimed, boot: str = "D") -> None:
        self.legs.on_mail(Published(leg.hold.request_id, leg.room, boot, D_NONCE, THERE, 5))

    def sent(self, leg: Claimed) -> None:
        self.legs.on_transfer(Sent(leg.room, 4096, 2, 300))

    def settle(self, leg: Claimed) -> None:
        self.legs.on_transfer(Settled(leg.room))

    def sender(self, leg: Claimed) -> Sender:
        return self.desk.kv.senders[leg.room]

    def flush(self) -> None:
        self.desk.flush()

    def reach(self, phase: str, **more: Any) -> tuple[Claimed, Task]:
        leg, task = self.start(**more)
        steps: dict[str, list[Callable[[Claimed], None]]] = {
            "started": [],
            "admitted": [self.admit],
            "mailed": [self.mail],
            "bootstrapped": [self.admit, self.mail],
            "computed": [self.admit, self.compute],
            "sealed": [self.admit, self.mail, self.compute],
            "sent": [self.admit, self.mail, self.compute, self.sent],
        }
        for step in steps[phase]:
            step(leg)
        return leg, task

    def assert_gone(self, leg: Claimed) -> None:
        assert self.desk.dropped[leg.hold.nonce] == 1
        assert self.legs.settled()
        assert self.legs.holds() == []
        assert (self.senders._rooms, self.senders._open) == ({}, {})
        assert not self.legs.unproven()


PHASES = ["started", "admitted", "mailed", "bootstrapped", "computed", "sealed"]


def test_a_leg_that_goes_well() -> None:
    worker = Worker()
    leg, task = worker.start(emitted=(9,))
    (prefill,) = worker.desk.told
    assert isinstance(prefill, Prefill)
    assert prefill.relay
    assert (prefill.work.prompt_ids, prefill.work.emitted) == (leg.prompt_ids, (9,))

    worker.admit(leg, cached_tokens=16)
    worker.mail(leg)
    sender = worker.sender(leg)
    assert sender.destination == Destination("D", THERE, 5, seal_nonce(D_NONCE))
    assert sender.parts == [Computed(leg.hold.nonce, 0, 1, 0, 1)]
    assert worker.legs.holds() == [leg.hold]

    worker.compute(leg)
    assert sender.sealed == [Seal(leg.room, 1, seal_nonce(D_NONCE), 1, 21, 2, FIRST, 16)]
    worker.sent(leg)
    worker.flush()
    hold, room, computed, transfer = worker.server.args("kv_ready")
    assert (hold, room, computed.stamps.cached_tokens, transfer) == (leg.hold, leg.room, 16, (300, 4096, 2))
    assert task.ends == ["ok: 21 tokens, 4096 bytes"]
    worker.assert_gone(leg)
    worker.flush()
    assert worker.server.names() == ["kv_ready"]


@pytest.mark.parametrize("order", ["admit mail compute", "admit compute mail", "mail admit compute"])
def test_mail_may_come_at_any_time(order: str) -> None:
    worker = Worker()
    leg, task = worker.start()
    for step in order.split():
        getattr(worker, step)(leg)
    assert worker.sender(leg).destination is not None
    assert len(worker.sender(leg).sealed) == 1
    worker.sent(leg)
    worker.flush()
    assert len(task.ends) == 1
    worker.assert_gone(leg)


def test_mail_twice_changes_nothing() -> None:
    worker = Worker()
    leg, _ = worker.reach("bootstrapped")
    there = worker.sender(leg).destination
    worker.mail(leg, boot="P")
    assert worker.sender(leg).destination == there


def test_mail_of_a_leg_that_is_gone_is_ignored() -> None:
    worker = Worker()
    leg, _ = worker.reach("sent")
    worker.flush()
    worker.mail(leg)
    worker.legs.on_mail(Ended("req_1", leg.room, Leg.PREFILL, "requeued", leg.hold.nonce))
    worker.sent(leg)
    worker.settle(leg)
    worker.assert_gone(leg)


def test_a_lost_mail_costs_one_renewal() -> None:
    worker = Worker()
    leg, _ = worker.reach("computed")
    worker.legs.on_renewed(Kept(leg.hold, State.PREFILL, RoomState.OPEN))
    worker.flush()
    assert worker.server.called == []

    worker.server.replies["published"] = PublishedPages("D", D_NONCE, THERE, 5)
    worker.legs.on_renewed(Kept(leg.hold, State.PREFILL, RoomState.PUBLISHED))
    worker.flush()
    assert worker.sender(leg).destination == Destination("D", THERE, 5, seal_nonce(D_NONCE))
    assert len(worker.sender(leg).sealed) == 1
    worker.legs.on_renewed(Kept(leg.hold, State.PREFILL, RoomState.PUBLISHED))
    worker.flush()
    assert worker.server.names() == ["published"]


def test_the_room_may_end_before_its_lost_mail_is_read() -> None:
    worker = Worker()
    leg, _ = worker.reach("computed")
    worker.legs.on_renewed(Kept(leg.hold, State.PREFILL, RoomState.PUBLISHED))
    worker.flush()
    assert worker.sender(leg).destination is None


def lost_by_mail(worker: Worker, leg: Claimed) -> None:
    worker.legs.on_mail(Ended("req_1", leg.room, Leg.PREFILL, "cancelled", leg.hold.nonce))


def lost_by_renewal(worker: Worker, leg: Claimed) -> None:
    worker.legs.on_lost(leg.hold, "cancelled")


def handed_back(worker: Worker, _: Claimed) -> None:
    worker.legs.hand_back()
    worker.flush()
    assert worker.server.args("release")[1] is Why.DRAIN


def engine_failed(worker: Worker, leg: Claimed) -> None:
    worker.legs.on_engine(Failed(leg.hold.nonce, "NaN"))
    worker.flush()
    assert worker.server.args("fail") == (leg.hold, "engine_failed", "NaN")


def too_late(worker: Worker, leg: Claimed) -> None:
    worker.legs.on_engine(Failed(leg.hold.nonce, "Too late.", "timeout"))
    worker.flush()
    assert worker.server.args("fail") == (leg.hold, "timeout", "Too late.")


ENDS: dict[Callable[[Worker, Claimed], None], bool] = {
    lost_by_mail: True,
    lost_by_renewal: True,
    handed_back: True,
    engine_failed: False,
    too_late: False,
}


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


def test_chunks_are_told_while_the_prompt_is_being_computed() -> None:
    worker = Worker()
    leg, _ = worker.reach("admitted")
    assert worker.legs.progress() == {}
    worker.legs.on_engine(Chunked(leg.hold.nonce, Stretch(1.0, 1.5, 16)))
    (told,) = worker.legs.progress().values()
    assert told.chunks == (Stretch(1000.0, 1500.0, 16),)
    worker.compute(leg)
    assert worker.legs.progress() == {}, "from now on the call that ends the leg has them"
    worker.legs.on_engine(Chunked("gone", Stretch(1.0, 1.5, 16)))


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


def test_only_a_room_that_is_unknown_here_is_settled_when_asked() -> None:
    worker = Worker()
    leg, _ = worker.reach("started")
    worker.legs.on_mail(Ask(leg.room, "D2"))
    worker.legs.on_mail(Ask(99, "D2"))
    worker.flush()
    assert worker.server.called == [("settle", (99, "D2"))]


def test_the_youngest_unsent_leg_makes_room() -> None:
    worker = Worker()
    worker.reach("sealed", number=3)
    old, _ = worker.reach("computed", number=1)
    young, task = worker.reach("computed", number=2)
    worker.legs.make_room()
    worker.legs.make_room()
    worker.server.away = True
    worker.flush()
    worker.server.away = False
    worker.flush()
    released = [args[:2] for name, args in worker.server.called if name == "release"]
    assert released == [(young.hold, Why.PRESSURE), (old.hold, Why.PRESSURE)]
    assert task.ends == ["ok: pressure"]
    worker.legs.make_room()
    worker.flush()
    assert len([name for name in worker.server.names() if name == "release"]) == 2


def test_full_while_much_is_uncomputed() -> None:
    worker = Worker(chunk_tokens=32)
    for number in range(3):
        worker.start(number, tokens=16)
        assert not worker.legs.full()
    leg, _ = worker.start(3, tokens=16)
    assert worker.legs.full()
    worker.admit(leg)
    worker.compute(leg)
    assert not worker.legs.full()


def test_full_while_much_is_unsent() -> None:
    worker = Worker(unsent_share=0.5)
    leg, _ = worker.start(1, tokens=801)  # of 1600
    worker.admit(leg)
    worker.compute(leg)
    assert worker.legs.full()
    worker.mail(leg)
    assert not worker.legs.full()


def test_a_task_names_its_request() -> None:
    worker = Worker()
    leg, task = worker.start()
    assert worker.legs.request_of(task) == leg.hold.request_id
    assert worker.legs.request_of(Task("other")) is None


def test_what_a_prefill_worker_never_hears_is_a_bug() -> None:
    worker = Worker()
    with pytest.raises(AssertionError):
        worker.legs.on_engine(Reserved("key", (1,)))
    with pytest.raises(AssertionError):
        worker.legs.on_mail(Ready("req_1", 1))


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


def test_decode_workers_are_greeted_and_nobody_else() -> None:
    worker = Worker()
    strange = GEOMETRY._replace(page_size=32)
    for peer in (card("D"), card("P", "prefill"), card("U", "unified"), card("S", geometry=strange)):
        worker.legs.on_peer(peer)
    assert worker.desk.kv.greeted == [card("D").agent_metadata]
