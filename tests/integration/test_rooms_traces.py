"""Which requests wait to be exported as traces: ended ones that are sampled, until they are dropped."""

from relay.request import Leg
from relay.rooms import Rooms
from relay.trace_context import TraceContext
from tests.integration.scene import LONG_MS, claim, submission
from tests.processes import until

CONTEXT = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", True, "a=b")


def test_an_ended_request_that_is_sampled_waits_until_it_is_dropped(rooms: Rooms) -> None:
    sampled, silent = submission(trace=CONTEXT), submission(trace=CONTEXT._replace(sampled=False))
    untraced = submission()
    for each in (sampled, silent, untraced):
        rooms.submit(each)
    assert rooms.take_traces(10, LONG_MS) == []
    for each in (sampled, silent, untraced):
        rooms.cancel(each.request_id)
    assert rooms.take_traces(10, 1) == [sampled.request_id]
    until(lambda: rooms.take_traces(10, LONG_MS) == [sampled.request_id], "it is due again", 10)
    assert rooms.take_traces(10, LONG_MS) == []
    rooms.drop_traces([sampled.request_id])


def test_no_more_are_taken_than_asked_for_and_the_oldest_first(rooms: Rooms) -> None:
    requests = [submission(trace=CONTEXT) for _ in range(3)]
    for each in requests:
        rooms.submit(each)
        rooms.cancel(each.request_id)
    assert rooms.take_traces(2, LONG_MS) == [each.request_id for each in requests[:2]]
    assert rooms.take_traces(2, LONG_MS) == [requests[2].request_id]


def test_the_trace_goes_with_the_request_to_its_worker_and_stays_after_a_retry(rooms: Rooms) -> None:
    request = submission(trace=CONTEXT)
    rooms.submit(request)
    for boot in ("P1", "P2"):
        got = claim(rooms, Leg.PREFILL, boot, wanted=request.request_id)
        assert got
        assert got.claimed.trace_id == CONTEXT.trace_id
        rooms.deregister(boot)
    record = rooms.record(request.request_id)
    assert record
    assert record.trace == CONTEXT
