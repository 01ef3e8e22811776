"""The prefill leg, event by event: the happy way in every order, and when no further one is claimed."""

import pytest

from relay.answers import Kept, PublishedPages, RoomState
from relay.mailbox import Ask, Ended, Published, Ready
from relay.request import Leg, State, Why
from relay.stretches import Stretch
from tests.desk import GEOMETRY, Task, card
from tests.prefill_rig import D_NONCE, FIRST, THERE, Worker
from workers.engine.messages import Chunked, Computed, Prefill, Reserved
from workers.transfer.base import Destination, Seal, Sent, seal_nonce


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
    assert (hold, room, computed.stamps.cached_tokens) == (leg.hold, leg.room, 16)
    assert transfer == (300, 4096, 2, 0)
    assert task.ends == ["ok: 21 tokens, 4096 bytes"]
    worker.assert_gone(leg)
    worker.flush()
    assert worker.server.names() == ["kv_ready"]


@pytest.mark.parametrize(("pages", "first_page"), [((8,), 1), ((), 2)])
@pytest.mark.parametrize("by_mail", [True, False])
def test_the_sender_hears_what_the_decode_worker_has(
    pages: tuple[int, ...], first_page: int, by_mail: bool
) -> None:
    worker = Worker()
    leg, _ = worker.reach("admitted")
    if by_mail:
        mail = Published(leg.hold.request_id, leg.room, "D", D_NONCE, pages, 5, first_page)
        worker.legs.on_mail(mail)
    else:
        worker.server.replies["published"] = PublishedPages("D", D_NONCE, pages, 5, first_page)
        worker.legs.on_renewed(Kept(leg.hold, State.PREFILL, RoomState.PUBLISHED))
        worker.flush()
    expected = Destination("D", pages, 5, seal_nonce(D_NONCE), first_page)
    assert worker.sender(leg).destination == expected
    assert worker.legs.pinned_pages() == len(pages)
    worker.compute(leg)
    (seal,) = worker.sender(leg).sealed
    assert seal.pages == 2, "all of the request"
    worker.legs.on_transfer(Sent(leg.room, 4096, 2, 300, spared_bytes=2048))
    worker.flush()
    assert worker.server.args("kv_ready")[3] == (300, 4096, 2, 2048)


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
        worker.legs.on_engine(Reserved("key", (1,), 0, 16))
    with pytest.raises(AssertionError):
        worker.legs.on_mail(Ready("req_1", 1))


def test_decode_workers_are_greeted_and_nobody_else() -> None:
    worker = Worker()
    strange = GEOMETRY._replace(page_size=32)
    for peer in (card("D"), card("P", "prefill"), card("U", "unified"), card("S", geometry=strange)):
        worker.legs.on_peer(peer)
    assert worker.desk.kv.greeted == [card("D").agent_metadata]
