"""Every way in which a decode leg may end early, and what is left of it then: nothing."""

import random
from collections.abc import Callable

import pytest
from redis.exceptions import ResponseError

from relay.answers import Kept, RoomState
from relay.mailbox import Settled
from relay.request import Claimed, State, Why
from tests.decode_rig import (
    ENDS,
    PAGES,
    PHASES,
    Worker,
    engine_failed,
    handed_back,
    lost_by_mail,
    lost_by_renewal,
    reserved,
)
from tests.desk import STALE
from workers.decode import DecodeLegs, UnifiedLegs
from workers.engine.messages import (
    Drop,
    Failed,
    Refused,
    Retracted,
)
from workers.output import Close, Closed, Finished, Lost, Open, Outcome


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
    for event in (reserved(leg), Refused(key), Retracted(key), Failed(key, "late")):
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


@pytest.mark.parametrize("end", ENDS)
def test_a_unified_leg_ends_early(end: Callable[[Worker, Claimed], None]) -> None:
    worker = Worker(UnifiedLegs)
    leg, task = worker.start()
    end(worker, leg)
    assert len(task.ends) == 1
    worker.assert_gone(leg)
    assert worker.output.count(Close, leg.hold.nonce) >= 1


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


@pytest.mark.parametrize("seed", range(150))
@pytest.mark.parametrize("kind", [DecodeLegs, UnifiedLegs])
def test_any_order_of_events_ends_every_leg_once(kind: type[DecodeLegs], seed: int) -> None:
    """Whatever comes, in whatever order: once the server has had its say nothing is left, every task has
    ended once, and every page that a peer was told of went into quarantine or was sealed."""
    rng = random.Random(seed)
    worker = Worker(kind)
    legs = [worker.start(number) for number in range(4)]
    answered = set[str]()

    def reserve(leg: Claimed) -> None:
        if leg.hold.nonce not in answered and kind is DecodeLegs:
            answered.add(leg.hold.nonce)
            there = rng.randrange(3)
            right = reserved(leg, PAGES[there:], there)
            event = Refused(leg.hold.nonce) if rng.random() < 0.2 else right
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
