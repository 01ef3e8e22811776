"""The decode leg, event by event: the happy way in every order, every way in which it may end, and what
becomes of pages that a peer may still write."""

import random
from collections.abc import Callable
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from redis.exceptions import ResponseError

from relay.answers import Forked, Kept, RoomState
from relay.mailbox import Ask, Ended, Published, Ready, Settled
from relay.request import Claimed, Leg, Ring, State, Why
from relay.sampling import SamplingParams
from relay.settings import Settings
from tests.desk import STALE, Receiver, RecordingDesk, Task, card, claimed, kill
from tests.samples import samples, value_of
from workers import calls
from workers.decode import DecodeLegs, UnifiedLegs
from workers.engine.messages import (
    Drop,
    Failed,
    Prebuilt,
    Prefill,
    Prefilled,
    Proven,
    Refused,
    Reserve,
    Reserved,
    Retracted,
    Sampled,
)
from workers.meters import Meters
from workers.output import Close, Closed, Finished, Lost, Message, Open, Outcome, OutputThread
from workers.transfer.base import Seal, seal_nonce

PAGES = (3, 4)
FIRST = Sampled(42)


@pytest.fixture(autouse=True)
def _retry_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "RETRY_S", 0.0)


class Output:
    """Stands where the output thread is; the tests answer for it."""

    def __init__(self) -> None:
        self.got: list[Message] = []

    def put(self, message: Message) -> None:
        self.got.append(message)

    def count(self, kind: type[Open] | type[Close], key: str) -> int:
        return sum(isinstance(message, kind) and message.key == key for message in self.got)


class Worker:
    """The legs of a decode worker, with what the threads and peers around them would do."""

    def __init__(self, kind: type[DecodeLegs] = DecodeLegs, **settings: Any) -> None:
        self.desk = RecordingDesk(**settings)
        self.server = self.desk.server
        self.manager = self.desk.kv
        self.output = Output()
        self.counted = CollectorRegistry()
        meters = Meters(Settings(role="decode"), self.counted)
        self.legs = kind(self.desk, cast(OutputThread, self.output), meters)

    def start(self, number: int = 1, **more: Any) -> tuple[Claimed, Task]:
        leg = claimed(self.legs.takes, number, **more)
        task = Task(leg.hold.request_id)
        self.legs.start(leg, task)
        return leg, task

    def reserve(self, leg: Claimed) -> None:
        self.legs.on_engine(Reserved(leg.hold.nonce, PAGES))

    def publish(self, leg: Claimed) -> None:
        self.reserve(leg)
        self.desk.flush()

    def write(self, leg: Claimed, **other: Any) -> None:
        """The prefill worker writes the seal."""
        right = Seal(
            leg.room, leg.attempt, seal_nonce(leg.hold.nonce), len(leg.emitted), len(leg.tokens), 2, FIRST, 0
        )
        self.receiver(leg).written = right._replace(**other)

    def ready(self, leg: Claimed) -> None:
        self.legs.on_mail(Ready(leg.hold.request_id, leg.room))

    def run(self, leg: Claimed) -> None:
        self.write(leg)
        self.ready(leg)

    def retract(self, leg: Claimed) -> None:
        self.legs.on_engine(Retracted(leg.hold.nonce))

    def receiver(self, leg: Claimed) -> Receiver:
        return self.manager.receivers[leg.room]

    def flush(self) -> None:
        self.desk.flush()

    def reach(self, phase: str, **more: Any) -> tuple[Claimed, Task]:
        leg, task = self.start(**more)
        steps: dict[str, list[Callable[[Claimed], None]]] = {
            "reserving": [],
            "publishing": [self.reserve],  # the call waits
            "published": [self.publish],
            "running": [self.publish, self.run],
            "closing": [self.publish, self.run, self.retract],
        }
        for step in steps[phase]:
            step(leg)
        return leg, task

    def assert_gone(self, leg: Claimed, quarantined: bool = False) -> None:
        key = leg.hold.nonce
        assert self.desk.dropped[key] >= 1
        drops = [each for each in self.desk.told if isinstance(each, Drop) and each.key == key]
        assert any(drop.quarantine == leg.room for drop in drops) is quarantined
        assert self.legs.settled()
        assert self.legs.holds() == []
        assert bool(self.manager.quarantined) is quarantined
        assert len(self.manager.free_rows) == 4 - quarantined


PHASES = ["reserving", "publishing", "published", "running", "closing"]


def test_a_leg_that_goes_well() -> None:
    worker = Worker()
    leg, task = worker.start(emitted=(8, 9))
    assert worker.desk.told == [Reserve(leg.hold.nonce, "req_1", 22)]
    worker.publish(leg)
    row = worker.receiver(leg).row
    assert worker.server.called == [("publish", (leg.hold, leg.room, PAGES, row))]
    assert worker.output.got == []

    worker.run(leg)
    assert worker.output.got == [Open(leg.hold.nonce, leg)]
    prebuilt = worker.desk.told[-1]
    assert isinstance(prebuilt, Prebuilt)
    assert prebuilt.first == FIRST
    assert (prebuilt.work.key, prebuilt.work.emitted) == (leg.hold.nonce, (8, 9))
    assert len(worker.manager.free_rows) == 4

    worker.legs.on_outcome(Finished(leg.hold.nonce, "stop"))
    assert task.ends == ["ok: stop"]
    worker.assert_gone(leg)
    worker.flush()
    assert worker.server.names() == ["publish"]


def test_ready_twice_or_late_changes_nothing() -> None:
    worker = Worker()
    leg, task = worker.reach("running")
    worker.ready(leg)
    worker.legs.on_renewed(Kept(leg.hold, State.READY, RoomState.SEALED))
    worker.legs.on_outcome(Finished(leg.hold.nonce, "length"))
    worker.ready(leg)
    assert sum(isinstance(command, Prebuilt) for command in worker.desk.told) == 1
    assert task.ends == ["ok: length"]
    worker.assert_gone(leg)


def test_a_lost_ready_costs_one_renewal() -> None:
    worker = Worker()
    leg, _ = worker.reach("published")
    worker.write(leg)
    worker.legs.on_renewed(Kept(leg.hold, State.PREFILL, RoomState.PUBLISHED))
    assert worker.output.got == []
    worker.legs.on_renewed(Kept(leg.hold, State.READY, RoomState.SEALED))
    assert isinstance(worker.desk.told[-1], Prebuilt)


def test_a_publish_that_the_server_forgot_is_said_again() -> None:
    worker = Worker()
    leg, _ = worker.reach("published")
    worker.legs.on_renewed(Kept(leg.hold, State.PREFILL, RoomState.OPEN))
    worker.flush()
    first, second = worker.server.called
    assert first == second


def test_stale_publish_quarantines_what_may_have_been_published_before() -> None:
    worker = Worker()
    worker.server.replies["publish"] = STALE
    leg, task = worker.reach("published")
    assert task.ends == ["failed: lost"]
    worker.assert_gone(leg, quarantined=True)


def test_publish_whose_reply_is_lost_is_said_again_also_when_ready_came_first() -> None:
    worker = Worker()
    leg, task = worker.reach("publishing")
    worker.server.lose_reply = True
    worker.flush()
    worker.run(leg)
    worker.flush()
    assert worker.server.names() == ["publish", "publish"]
    assert isinstance(worker.desk.told[-1], Prebuilt)
    worker.legs.on_outcome(Finished(leg.hold.nonce, "stop"))
    assert task.ends == ["ok: stop"]
    worker.assert_gone(leg)


def test_a_leg_lost_before_its_publish_was_sent_needs_no_quarantine() -> None:
    worker = Worker()
    worker.server.away = True
    leg, task = worker.reach("published")  # it is not: nobody heard
    worker.server.away = False
    worker.legs.on_lost(leg.hold, "expired")
    worker.flush()
    assert task.ends == ["failed: expired"]
    assert worker.server.called == []
    # The attempt to publish found no server, or one whose answer was lost: nobody can tell.
    worker.assert_gone(leg, quarantined=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"room": 1},
        {"attempt": 2},
        {"nonce": 5},
        {"position": 1},
        {"tokens": 19},
        {"pages": 1},
    ],
)
def test_a_seal_that_differs_is_never_text(wrong: dict[str, int]) -> None:
    worker = Worker()
    leg, task = worker.reach("published")
    worker.write(leg, **wrong)
    worker.ready(leg)
    worker.flush()
    assert worker.server.args("release") == (leg.hold, Why.ERROR)
    assert worker.output.got == []
    assert task.ends == ["failed: error"]
    worker.assert_gone(leg, quarantined=True)


def test_a_seal_from_before_another_decode_worker_died_is_text() -> None:
    worker = Worker()
    leg, _ = worker.reach("published", attempt=2)
    worker.write(leg, attempt=1)
    worker.ready(leg)
    assert isinstance(worker.desk.told[-1], Prebuilt)


def test_an_unwritten_row_is_never_text() -> None:
    worker = Worker()
    leg, _ = worker.reach("published")
    worker.ready(leg)
    worker.flush()
    assert worker.server.args("release") == (leg.hold, Why.ERROR)
    worker.assert_gone(leg, quarantined=True)


def test_pages_whose_digest_differs_are_never_text() -> None:
    worker = Worker()
    leg, _ = worker.reach("published")
    worker.write(leg)
    worker.receiver(leg).digest_matches = False
    worker.ready(leg)
    worker.flush()
    assert worker.server.args("release") == (leg.hold, Why.ERROR)
    worker.assert_gone(leg, quarantined=True)


def lost_by_mail(worker: Worker, leg: Claimed) -> None:
    worker.legs.on_mail(Ended("req_1", leg.room, Leg.DECODE, "cancelled", leg.hold.nonce))


def lost_by_renewal(worker: Worker, leg: Claimed) -> None:
    worker.legs.on_lost(leg.hold, "cancelled")


def handed_back(worker: Worker, leg: Claimed) -> None:
    running = worker.output.count(Open, leg.hold.nonce) == 1
    worker.legs.hand_back()
    if running:  # what it produced is emitted before it goes
        assert worker.output.count(Close, leg.hold.nonce) == 1
        worker.legs.on_outcome(Closed(leg.hold.nonce))
    worker.flush()
    assert worker.server.args("release")[1] in {Why.DRAIN, Why.RETRACT}


def engine_failed(worker: Worker, leg: Claimed) -> None:
    worker.legs.on_engine(Failed(leg.hold.nonce, "NaN"))
    worker.flush()
    assert worker.server.args("fail") == (leg.hold, "engine_failed", "NaN")


ENDS: dict[Callable[[Worker, Claimed], None], bool] = {
    lost_by_mail: True,
    lost_by_renewal: True,
    handed_back: True,
    engine_failed: False,
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("end", ENDS)
def test_an_early_end_in_each_phase(phase: str, end: Callable[[Worker, Claimed], None]) -> None:
    worker = Worker()
    leg, task = worker.reach(phase)
    end(worker, leg)
    worker.flush()
    assert len(task.ends) == 1
    assert task.ends[0].startswith("ok") is ENDS[end]
    queued_first = phase == "publishing" and end in {handed_back, engine_failed}
    worker.assert_gone(leg, quarantined=phase == "published" or queued_first)
    if phase in {"running", "closing"}:
        assert worker.output.count(Close, leg.hold.nonce) >= 1


@pytest.mark.parametrize("phase", PHASES)
def test_every_event_after_an_early_end_changes_nothing(phase: str) -> None:
    worker = Worker()
    leg, task = worker.reach(phase)
    lost_by_mail(worker, leg)
    worker.flush()
    told = list(worker.desk.told)
    key = leg.hold.nonce
    for event in (Reserved(key, PAGES), Refused(key), Retracted(key), Failed(key, "late")):
        worker.legs.on_engine(event)
    for outcome in (Finished(key, "stop"), Lost(key), Closed(key)):
        worker.legs.on_outcome(outcome)
    worker.ready(leg)
    lost_by_mail(worker, leg)
    lost_by_renewal(worker, leg)
    worker.legs.hand_back()
    worker.flush()
    assert worker.desk.told == told
    assert worker.server.names() in ([], ["publish"])
    assert task.ends == ["ok: cancelled"]


def test_refused_hands_back() -> None:
    worker = Worker()
    leg, task = worker.reach("reserving")
    worker.legs.on_engine(Refused(leg.hold.nonce))
    worker.flush()
    assert worker.server.called == [("release", (leg.hold, Why.PRESSURE))]
    assert task.ends == ["ok: pressure"]
    worker.assert_gone(leg)


def test_without_a_row_it_hands_back_and_claims_no_more() -> None:
    worker = Worker(max_running=4)
    for number in range(1, 5):
        assert not worker.legs.full()
        worker.reach("published", number=number)
    assert worker.legs.full()
    leg, task = worker.start(number=5)
    worker.publish(leg)
    assert worker.server.args("release") == (leg.hold, Why.PRESSURE)
    assert task.ends == ["ok: pressure"]


def test_quarantined_rows_count_when_it_is_full() -> None:
    worker = Worker(max_running=1)
    leg, _ = worker.reach("published")
    lost_by_mail(worker, leg)
    assert worker.legs.full()
    worker.legs.on_mail(Settled(leg.room))
    assert not worker.legs.full()


def test_an_unknown_writer_hands_back_before_anything_is_reserved() -> None:
    worker = Worker()
    leg, task = worker.start(prefill_boot="nobody")
    worker.flush()
    assert worker.server.called == [("release", (leg.hold, Why.PEER))]
    assert not any(isinstance(command, Reserve) for command in worker.desk.told)
    worker.assert_gone(leg)
    assert len(task.ends) == 1


def test_retracted_emits_what_it_has_and_goes_back_to_the_queue() -> None:
    worker = Worker()
    leg, task = worker.reach("running")
    worker.retract(leg)
    assert worker.output.count(Close, leg.hold.nonce) == 1
    assert worker.legs.holds() == [leg.hold], "ours until its tokens are emitted"
    worker.flush()
    assert "release" not in worker.server.names()
    worker.legs.on_outcome(Closed(leg.hold.nonce))
    worker.flush()
    assert worker.server.args("release") == (leg.hold, Why.RETRACT)
    assert task.ends == ["ok: retract"]
    worker.assert_gone(leg)


def test_output_that_loses_a_leg_leaves_it_to_the_renewal() -> None:
    worker = Worker()
    leg, task = worker.reach("running")
    worker.legs.on_outcome(Lost(leg.hold.nonce))
    assert task.ends == ["failed: lost"]
    worker.assert_gone(leg)


def test_output_that_cannot_go_on_gives_the_leg_back_as_wrong() -> None:
    worker = Worker()
    leg, task = worker.reach("running")
    worker.legs.on_outcome(Lost(leg.hold.nonce, "ValueError('no such token')"))
    worker.flush()
    assert worker.server.args("release") == (leg.hold, Why.ERROR)
    assert task.ends == ["failed: error"]
    worker.assert_gone(leg)


def test_a_renewal_may_say_finished_before_the_output_does() -> None:
    worker = Worker()
    leg, task = worker.reach("running")
    worker.legs.on_lost(leg.hold, "finished")
    worker.legs.on_outcome(Finished(leg.hold.nonce, "stop"))
    assert task.ends == ["ok: finished"]


@pytest.mark.parametrize("call", ["publish", "release", "fail"])
def test_a_call_refused_for_good_leaves_the_leg_to_the_renewal(call: str) -> None:
    worker = Worker()
    worker.server.replies[call] = ResponseError("wrong type")
    leg, task = worker.reach("published")
    if call == "release":
        worker.legs.hand_back()
    if call == "fail":
        worker.legs.on_engine(Failed(leg.hold.nonce, "NaN"))
    worker.flush()
    assert worker.legs.holds() == [], "what is not listed goes back to its queue"
    assert len(task.ends) == 1
    worker.assert_gone(leg, quarantined=True)


@pytest.mark.parametrize("phase", ["reserving", "published"])
def test_redis_away_in_the_middle_of_a_hand_back(phase: str) -> None:
    worker = Worker()
    leg, task = worker.reach(phase)
    worker.server.away = True
    for _ in range(3):
        worker.legs.hand_back()
        worker.flush()
    if phase == "reserving":
        worker.reserve(leg)
    else:
        worker.run(leg)
    worker.flush()
    assert worker.legs.holds() == [leg.hold], "still ours until the server has heard it"
    worker.server.away = False
    worker.flush()
    assert [name for name in worker.server.names() if name != "publish"] == ["release"]
    assert task.ends == ["ok: drain"]
    assert worker.output.got == []
    worker.assert_gone(leg, quarantined=phase == "published")


# ---- quarantine


def test_quarantined_pages_are_asked_for_until_they_are_settled() -> None:
    worker = Worker()
    leg, _ = worker.reach("published")
    worker.legs.on_mail(Settled(leg.room))
    assert Proven(leg.room) not in worker.desk.told, "they are not in quarantine"
    lost_by_mail(worker, leg)
    worker.server.called.clear()
    for now in (100.0, 100.05, 101.0):
        worker.legs.tick(now)
        worker.flush()
    assert worker.server.called == [("ask", ("P", leg.room, "here"))] * 2
    worker.legs.on_mail(Settled(leg.room))
    worker.legs.on_mail(Settled(leg.room))
    assert worker.desk.told[-2:] == [Drop(leg.hold.nonce, leg.room), Proven(leg.room)]
    assert len(worker.manager.free_rows) == 4
    assert not worker.legs.unproven()
    told = samples(generate_latest(worker.counted).decode())
    assert value_of(told, "kvrelay_quarantine_seconds_count") == 1


def test_the_death_of_the_writer_is_proof_when_it_is_seen_twice() -> None:
    worker = Worker()
    worker.desk.peers["P"] = kill(worker.desk.peers["P"])
    leg, _ = worker.reach("published")
    lost_by_mail(worker, leg)
    worker.legs.tick(100.0)
    worker.flush()
    assert worker.desk.told[-1] != Proven(leg.room)
    worker.legs.tick(101.0)
    worker.flush()
    assert worker.desk.told[-1] == Proven(leg.room)
    assert "ask" not in worker.server.names()
    assert worker.manager.forgotten == ["P"]
    assert len(worker.manager.free_rows) == 4


def test_an_outage_piles_up_no_questions() -> None:
    worker = Worker()
    leg, _ = worker.reach("published")
    lost_by_mail(worker, leg)
    worker.server.away = True
    for second in range(100, 200):
        worker.legs.tick(float(second))
        worker.flush()
    assert len(worker.desk.calls) == 1


def test_a_room_that_was_claimed_twice_frees_all_its_pages() -> None:
    """The first publish was lost on its way, so the room stayed open and came here again."""
    worker = Worker()
    worker.server.replies["publish"] = STALE
    first, _ = worker.reach("published")
    worker.server.replies.clear()
    again = claimed(Leg.DECODE, 2, room=first.room)
    worker.legs.start(again, Task("req_1"))
    worker.publish(again)
    lost_by_mail(worker, again)
    assert [each.pages for each in worker.legs.unproven()] == [4]
    worker.legs.on_mail(Settled(first.room))
    assert len(worker.manager.free_rows) == 4
    assert not worker.legs.unproven()


def test_what_a_decode_worker_never_hears_is_a_bug() -> None:
    worker = Worker()
    with pytest.raises(AssertionError):
        worker.legs.on_mail(Ask(1, "D"))
    with pytest.raises(AssertionError):
        worker.legs.on_mail(Published("req_1", 1, "D", "n", (1,), 1))
    assert worker.legs.request_of(Task("other")) is None


# ---- a unified worker


def test_a_unified_leg_prefills_here() -> None:
    worker = Worker(UnifiedLegs)
    leg, task = worker.start()
    (prefill,) = worker.desk.told
    assert isinstance(prefill, Prefill)
    assert not prefill.relay
    assert worker.output.got == [Open(leg.hold.nonce, leg)]
    worker.legs.on_outcome(Finished(leg.hold.nonce, "stop"))
    assert task.ends == ["ok: stop"]
    worker.assert_gone(leg)


@pytest.mark.parametrize("end", ENDS)
def test_a_unified_leg_ends_early(end: Callable[[Worker, Claimed], None]) -> None:
    worker = Worker(UnifiedLegs)
    leg, task = worker.start()
    end(worker, leg)
    assert len(task.ends) == 1
    worker.assert_gone(leg)
    assert worker.output.count(Close, leg.hold.nonce) >= 1


# ---- forks of a prompt


def forks(worker: Worker, *numbers: int, rings: tuple[Ring, ...] = ()) -> list[Claimed]:
    """What the server will grant."""
    granted = [claimed(Leg.BOTH, number) for number in numbers]
    worker.server.replies["claim_forks"] = Forked(granted, list(rings))
    return granted


def arrive(worker: Worker, leg: Claimed) -> None:
    """The KV of the prompt comes into the pool, in the way of this role."""
    if worker.legs.takes is Leg.BOTH:
        worker.legs.on_engine(Prefilled(leg.hold.nonce, FIRST))
    else:
        worker.publish(leg)
        worker.run(leg)
    worker.flush()


@pytest.mark.parametrize("kind", [DecodeLegs, UnifiedLegs])
def test_forks_begin_once_the_kv_of_their_prompt_is_here(kind: type[DecodeLegs]) -> None:
    worker = Worker(kind)
    leg, task = worker.start(forks=2)
    granted = forks(worker, 11, 12)
    worker.flush()
    assert "claim_forks" not in worker.server.names()

    arrive(worker, leg)
    hold, boot, lease_ms, nonces = worker.server.args("claim_forks")
    assert (hold, boot, lease_ms) == (leg.hold, "here", worker.desk.settings.lease_ms)
    assert len(set(nonces)) == 2
    *_, first, second = worker.desk.told
    for fork, prefill in zip(granted, (first, second)):
        assert isinstance(prefill, Prefill)
        assert (prefill.work.key, prefill.relay) == (fork.hold.nonce, False)
        assert worker.output.count(Open, fork.hold.nonce) == 1
    assert kind is UnifiedLegs or isinstance(worker.desk.told[-3], Prebuilt), "its pages are shared by then"
    assert worker.legs.holds() == [leg.hold, *(fork.hold for fork in granted)]
    assert [beside.request_id for beside in task.beside] == ["req_11", "req_12"]
    assert [worker.legs.request_of(beside) for beside in task.beside] == ["req_11", "req_12"]

    for fork in granted:
        worker.legs.on_engine(Prefilled(fork.hold.nonce, FIRST))
    worker.flush()
    assert worker.server.names().count("claim_forks") == 1, "forks have none"
    for number, each in enumerate([leg, *granted]):
        worker.legs.on_outcome(Finished(each.hold.nonce, "stop"))
        assert len(worker.legs.holds()) == 2 - number
    assert [beside.ends for beside in task.beside] == [["ok: stop"], ["ok: stop"]]
    worker.assert_gone(leg)


@pytest.mark.parametrize("kind", [DecodeLegs, UnifiedLegs])
@pytest.mark.parametrize(("room_tokens", "nonces"), [(0, 0), (31, 0), (32, 1), (64, 2), (10_000, 3)])
def test_no_more_forks_than_there_is_room_for(kind: type[DecodeLegs], room_tokens: int, nonces: int) -> None:
    """20 tokens of prompt fill one page of 16 that is shared; a fork needs two more to grow into."""
    worker = Worker(kind, page_size=16, reserve_tokens=16)
    worker.desk.room_tokens = room_tokens
    leg, _ = worker.start(forks=3, params=SamplingParams(max_tokens=1000))
    arrive(worker, leg)
    assert len(worker.server.args("claim_forks")[3]) == nonces, "the server sends the others to their queue"


@pytest.mark.parametrize("kind", [DecodeLegs, UnifiedLegs])
def test_a_request_that_leads_nobody_asks_nobody(kind: type[DecodeLegs]) -> None:
    worker = Worker(kind)
    leg, _ = worker.start()
    arrive(worker, leg)
    assert "claim_forks" not in worker.server.names()


def test_an_outage_repeats_the_same_claim() -> None:
    worker = Worker(UnifiedLegs)
    leg, task = worker.start(forks=1)
    forks(worker, 11)
    worker.server.lose_reply = True
    arrive(worker, leg)
    assert task.beside == []
    worker.flush()
    first, second = [args for name, args in worker.server.called if name == "claim_forks"]
    assert first == second
    assert len(task.beside) == 1


def test_a_claim_that_is_refused_for_good_leaves_the_leader_alone() -> None:
    worker = Worker(UnifiedLegs)
    leg, task = worker.start(forks=1)
    worker.server.replies["claim_forks"] = ResponseError("wrong type")
    arrive(worker, leg)
    assert worker.legs.holds() == [leg.hold]
    assert task.ends == task.beside == []


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", [DecodeLegs, UnifiedLegs])
def test_claimed_forks_run_whatever_becomes_of_their_leader(
    kind: type[DecodeLegs], end: Callable[[Worker, Claimed], None]
) -> None:
    worker = Worker(kind)
    leg, task = worker.start(forks=1)
    (fork,) = forks(worker, 11)
    arrive(worker, leg)
    end(worker, leg)
    assert len(task.ends) == 1
    assert worker.legs.holds() == [fork.hold]
    assert task.beside[0].ends == []


@pytest.mark.parametrize("end", ENDS)
def test_a_fork_ends_early(end: Callable[[Worker, Claimed], None]) -> None:
    worker = Worker()
    leg, task = worker.start(forks=1)
    (fork,) = forks(worker, 11)
    arrive(worker, leg)
    end(worker, fork)
    assert len(task.beside[0].ends) == 1
    assert worker.desk.dropped[fork.hold.nonce] >= 1
    assert worker.legs.holds() == [leg.hold]
    assert task.ends == []


def test_a_leader_that_leaves_claims_no_forks() -> None:
    worker = Worker(UnifiedLegs)
    leg, _ = worker.start(forks=1)
    worker.retract(leg)
    arrive(worker, leg)
    assert "claim_forks" not in worker.server.names()


def test_who_finishes_rings_for_the_forks_it_sets_free() -> None:
    worker = Worker(UnifiedLegs)
    leg, _ = worker.start(forks=1)
    bell = Ring(Leg.PREFILL, "req_11", 20)
    worker.legs.on_outcome(Finished(leg.hold.nonce, "length", (bell,)))
    assert worker.desk.rung == [bell]


# ---- any order


@pytest.mark.parametrize("seed", range(150))
@pytest.mark.parametrize("kind", [DecodeLegs, UnifiedLegs])
def test_any_order_of_events_ends_every_leg_once(kind: type[DecodeLegs], seed: int) -> None:
    """Whatever comes, in whatever order: once the server has had its say nothing is left, every task has
    ended once, and every page that a peer was told of went into quarantine or was sealed."""
    rng = random.Random(seed)
    worker = Worker(kind)
    legs = [worker.start(number) for number in range(4)]
    reserved = set[str]()

    def reserve(leg: Claimed) -> None:
        if leg.hold.nonce not in reserved and kind is DecodeLegs:
            reserved.add(leg.hold.nonce)
            event = Refused(leg.hold.nonce) if rng.random() < 0.2 else Reserved(leg.hold.nonce, PAGES)
            worker.legs.on_engine(event)

    def write(leg: Claimed) -> None:
        receiver = worker.manager.receivers.get(leg.room)
        if receiver and receiver.released is None:
            worker.write(leg, **rng.choice([{}, {}, {}, {"attempt": 7}]))

    def renewed(leg: Claimed) -> None:
        if leg.hold in worker.legs.holds():
            worker.legs.on_renewed(Kept(leg.hold, State.PREFILL, rng.choice(list(RoomState))))

    def lost(leg: Claimed) -> None:
        rng.choice([lost_by_mail, lost_by_renewal])(worker, leg)

    def engine(leg: Claimed) -> None:
        key = leg.hold.nonce
        worker.legs.on_engine(Retracted(key) if rng.random() < 0.5 else Failed(key, "NaN"))

    def outcome(leg: Claimed) -> None:
        key = leg.hold.nonce
        outcomes: list[Outcome] = [Finished(key, "stop"), Lost(key), Lost(key, "wrong")]
        if worker.output.count(Close, key):
            outcomes.append(Closed(key))
        if worker.output.count(Open, key):
            worker.legs.on_outcome(rng.choice(outcomes))

    def settled(leg: Claimed) -> None:
        worker.legs.on_mail(Settled(leg.room))

    def server(_: Claimed) -> None:
        worker.server.away = rng.random() < 0.3
        worker.server.lose_reply = rng.random() < 0.2
        for call in ("release", "fail", "publish"):
            worker.server.replies.pop(call, None)
            if rng.random() < 0.2:
                worker.server.replies[call] = rng.choice([STALE, ResponseError("wrong type")])
        worker.flush()

    def hand_back(_: Claimed) -> None:
        worker.legs.hand_back()

    def tick(_: Claimed) -> None:
        worker.legs.tick(rng.uniform(0.0, 1000.0))

    often = [reserve, write, worker.ready, server, renewed, outcome, settled, tick]
    rare = [lost, engine, hand_back]
    for _ in range(80):
        event = rng.choice(often if rng.random() < 0.9 else rare)
        event(rng.choice(legs)[0])

    worker.server.away = worker.server.lose_reply = False
    worker.server.replies.clear()
    worker.flush()
    for hold in worker.legs.holds():
        worker.legs.on_lost(hold, "expired")
    worker.flush()
    assert worker.legs.settled()
    told_of = {args[1] for name, args in worker.server.called if name == "publish"}
    opened = {message.key for message in worker.output.got if isinstance(message, Open)}
    for leg, task in legs:
        key = leg.hold.nonce
        assert len(task.ends) == 1, task
        assert worker.desk.dropped[key] >= 1
        put_aside = any(isinstance(c, Drop) and c.quarantine == leg.room for c in worker.desk.told)
        if leg.room in told_of:
            assert put_aside or key in opened
        assert worker.output.count(Close, key) >= worker.output.count(Open, key)
    for leg, _ in legs:
        worker.legs.on_mail(Settled(leg.room))
    assert len(worker.manager.free_rows) == 4
    assert not worker.legs.unproven()


@pytest.mark.parametrize(("kind", "times"), [(DecodeLegs, 1), (UnifiedLegs, 0)])
def test_a_decode_worker_looks_for_prefill_workers_that_connect(kind: type[DecodeLegs], times: int) -> None:
    worker = Worker(kind)
    for role in ("prefill", "decode", "unified"):
        worker.legs.on_peer(card(role, role))
    assert worker.manager.greeted_by == times
