"""What becomes of pages that a peer may still write when their decode leg ends."""

from prometheus_client import generate_latest

from relay.mailbox import Settled
from relay.request import Leg
from tests.decode_rig import Worker, lost_by_mail, reserved
from tests.desk import STALE, Task, claimed, kill
from tests.samples import samples, value_of
from workers.engine.messages import (
    Drop,
    Proven,
)


def test_stale_publish_quarantines_what_may_have_been_published_before() -> None:
    worker = Worker()
    worker.server.replies["publish"] = STALE
    leg, task = worker.reach("published")
    assert task.ends == ["failed: lost"]
    worker.assert_gone(leg, quarantined=True)


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


def test_quarantined_rows_count_when_it_is_full() -> None:
    worker = Worker(max_running=1)
    leg, _ = worker.reach("published")
    lost_by_mail(worker, leg)
    assert worker.legs.full()
    worker.legs.on_mail(Settled(leg.room))
    assert not worker.legs.full()


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


def test_only_pages_that_were_not_here_wait_for_proof() -> None:
    worker = Worker()
    leg, _ = worker.start()
    worker.legs.on_engine(reserved(leg, (9,), 1))
    worker.flush()
    lost_by_mail(worker, leg)
    assert [each.pages for each in worker.legs.unproven()] == [1]
    worker.assert_gone(leg, quarantined=True)
    worker.legs.on_mail(Settled(leg.room))
    assert not worker.legs.unproven()
