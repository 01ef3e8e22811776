"""The decode leg, event by event: the happy way in every order, and what it does with mail and renewals."""

import pytest

from relay.answers import Kept, RoomState
from relay.mailbox import Ask, Published
from relay.request import State, Why
from tests.decode_rig import FIRST, PAGES, Worker, reserved
from tests.desk import Task, card
from workers.decode import DecodeLegs, UnifiedLegs
from workers.engine.messages import (
    Prebuilt,
    Prefill,
    Refused,
    Reserve,
)
from workers.output import Close, Closed, Finished, Open


def test_a_leg_that_goes_well() -> None:
    worker = Worker()
    leg, task = worker.start(emitted=(8, 9))
    (reserve,) = worker.desk.told
    assert isinstance(reserve, Reserve)
    work = reserve.work
    assert (work.key, work.prompt_ids, work.emitted) == (leg.hold.nonce, leg.prompt_ids, (8, 9))
    worker.publish(leg)
    row = worker.receiver(leg).row
    assert worker.server.called == [("publish", (leg.hold, leg.room, PAGES, row, 0))]
    assert worker.output.got == []

    worker.run(leg)
    assert worker.output.got == [Open(leg.hold.nonce, leg)]
    prebuilt = worker.desk.told[-1]
    assert isinstance(prebuilt, Prebuilt)
    assert prebuilt.first == FIRST
    assert prebuilt.key == leg.hold.nonce
    assert len(worker.manager.free_rows) == 4

    worker.legs.on_outcome(Finished(leg.hold.nonce, "stop"))
    assert task.ends == ["ok: stop"]
    worker.assert_gone(leg)
    worker.flush()
    assert worker.server.names() == ["publish"]


@pytest.mark.parametrize("pages", [(9,), ()])
def test_only_pages_that_were_not_here_are_published(pages: tuple[int, ...]) -> None:
    worker = Worker()
    leg, _ = worker.start()
    first_page = 2 - len(pages)
    worker.legs.on_engine(reserved(leg, pages, first_page))
    worker.flush()
    row = worker.receiver(leg).row
    assert worker.server.args("publish") == (leg.hold, leg.room, pages, row, first_page)
    worker.legs.on_renewed(Kept(leg.hold, State.PREFILL, RoomState.OPEN))  # the server forgot it
    worker.flush()
    publishes = [args for name, args in worker.server.called if name == "publish"]
    assert publishes == [publishes[0]] * 2, "and hears the same again"
    assert worker.legs.pinned_pages() == len(pages)

    worker.run(leg)  # the seal names all pages
    prebuilt = worker.desk.told[-1]
    assert isinstance(prebuilt, Prebuilt)
    assert prebuilt.key == leg.hold.nonce


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


def test_what_a_decode_worker_never_hears_is_a_bug() -> None:
    worker = Worker()
    with pytest.raises(AssertionError):
        worker.legs.on_mail(Ask(1, "D"))
    with pytest.raises(AssertionError):
        worker.legs.on_mail(Published("req_1", 1, "D", "n", (1,), 1))
    assert worker.legs.request_of(Task("other")) is None


@pytest.mark.parametrize(("kind", "times"), [(DecodeLegs, 1), (UnifiedLegs, 0)])
def test_a_decode_worker_looks_for_prefill_workers_that_connect(kind: type[DecodeLegs], times: int) -> None:
    worker = Worker(kind)
    for role in ("prefill", "decode", "unified"):
        worker.legs.on_peer(card(role, role))
    assert worker.manager.greeted_by == times
