"""What the server counts for metrics, and what a worker is told about the requests it emits."""

from relay.answers import Backlog, Emission
from relay.request import BATCH_PRIORITY, Finish, Leg, State, Why
from relay.rooms import Rooms
from tests.integration.scene import LONG_MS, PREFILLED, card, claim, group, submission, tokens
from tests.integration.until import until

SUSPECT_AFTER = 3


def test_every_end_is_counted_once_by_how_why_and_where(rooms: Rooms) -> None:
    finished, cancelled, failed = (rooms.submit(submission()).request_id for _ in range(3))
    line = rooms.submit(submission(priority=BATCH_PRIORITY)).request_id
    hold = claim_of(rooms, finished)
    for _ in range(2):  # the reply to the first may have been lost
        rooms.emit([Emission(hold, 0, tokens(0, 2), Finish("length"))])
        rooms.cancel(cancelled)
        rooms.cancel(line)
    rooms.fail(claim_of(rooms, failed), "engine_failed", "no")
    ended = {name[1:]: times for name, times in rooms.counts().items() if name[0] == "ended"}
    assert ended == {
        ("client", "finished", "length", "decode"): 1,
        ("client", "cancelled", "cancelled", "queued"): 1,
        ("client", "failed", "engine_failed", "decode"): 1,
        ("batch", "cancelled", "cancelled", "queued"): 1,
    }
    assert rooms.counts()["submitted", "request"] == 4


def test_legs_that_go_back_are_counted_by_reason_and_leases_by_what_became_of_them(rooms: Rooms) -> None:
    rooms.register(card("U", "unified"))
    request_id = rooms.submit(submission()).request_id
    hold = claim_of(rooms, request_id)
    rooms.renew("U", card("U").load, [hold], 60_000)
    rooms.release(hold, Why.DRAIN)
    assert not rooms.release(hold, Why.DRAIN).ok
    rooms.emit([Emission(hold, 0, tokens(0, 1))])
    claim_of(rooms, request_id, lease_ms=1)

    until(lambda: rooms.reap(200, SUSPECT_AFTER).expired, "the lease expires")
    counts = rooms.counts()
    assert counts["returned", "decode", "drain"] == counts["returned", "decode", "expired"] == 1
    assert counts["lease", "granted"] == counts["lease", "fenced"] == 2
    assert counts["lease", "renewed"] == counts["lease", "expired"] == 1
    assert counts["registered", "unified"] == 1


def test_prompts_that_are_computed_where_they_decode_are_counted(rooms: Rooms) -> None:
    hold = claim_of(rooms, rooms.submit(*group(forks=3)).request_id)
    rooms.emit([Emission(hold, 0, tokens(0, 1), prefilled=PREFILLED)])
    for _ in range(2):  # the reply to the first may have been lost
        rooms.claim_forks(hold, "U", LONG_MS, ["n1", "n2"])
    assert claim(rooms, Leg.PREFILL, "P"), "the fork that was left goes through a room"
    counts = rooms.counts()
    assert (counts["local", "unified"], counts["local", "fork"]) == (1, 2)


def test_the_first_token_and_the_end_are_told_once_and_not_of_batches(rooms: Rooms) -> None:
    hold = claim_of(rooms, rooms.submit(submission(tokens=5)).request_id)
    first = Emission(hold, 0, tokens(0, 2), prefilled=PREFILLED)
    (told,) = rooms.emit([first])
    assert told.milestone
    assert told.milestone.first
    assert not told.milestone.ended
    assert told.milestone.submitted <= told.milestone.claimed <= told.milestone.first_token
    assert rooms.emit([first])[0].milestone is None, "it has been told"
    assert rooms.emit([Emission(hold, 2, tokens(2, 1))])[0].milestone is None
    last = Emission(hold, 3, [], Finish("stop"))
    (told,) = rooms.emit([last])
    assert told.milestone
    assert not told.milestone.first
    assert told.milestone.ended >= told.milestone.first_token
    assert told.milestone.prefill_end > told.milestone.prefill_start
    assert (told.milestone.prompt_tokens, told.milestone.completion_tokens) == (5, 3)
    assert told.milestone.cached_tokens == PREFILLED.stamps.cached_tokens
    assert rooms.emit([last])[0].milestone is None

    line = claim_of(rooms, rooms.submit(submission(priority=BATCH_PRIORITY)).request_id)
    assert rooms.emit([Emission(line, 0, tokens(0, 1), Finish("stop"))])[0].milestone is None


def test_the_backlog_tells_the_oldest_of_each_queue_apart_for_batches(rooms: Rooms) -> None:
    legs = (Leg.PREFILL, Leg.DECODE)
    assert rooms.backlog() == [Backlog(leg, kind, 0, 0) for leg in legs for kind in (False, True)]
    low = submission(priority=9)
    rooms.submit(low)

    def oldest_ms(kind: int) -> int:
        return rooms.backlog()[kind].oldest_ms

    until(lambda: oldest_ms(0) > 20, "it waits")
    rooms.submit(submission(priority=0))  # goes first, and came last
    rooms.submit(submission(priority=BATCH_PRIORITY))
    clients, lines, *decode = rooms.backlog()
    assert (clients.legs, lines.legs) == (2, 1)
    assert clients.oldest_ms > 20
    assert clients.oldest_ms > lines.oldest_ms
    assert [queue.legs for queue in decode] == [0, 0]
    assert rooms.record(low.request_id).state is State.QUEUED  # type: ignore[union-attr]


def claim_of(rooms: Rooms, request_id: str, **more: int):
    found = claim(rooms, Leg.BOTH, "U", wanted=request_id, **more)
    assert found
    assert found.claimed.hold.request_id == request_id
    return found.claimed.hold
