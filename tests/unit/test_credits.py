"""Credits: held while they cannot claim, given up when nothing waits for them."""

from math import inf

from relay.request import Leg
from tests.desk import Task
from workers.credits import RETRY_S, Credits
from workers.doorbell import Doorbell


def bells(count: int) -> list[Doorbell]:
    return [Doorbell(f"req_{i}", Leg.PREFILL, Task(f"req_{i}")) for i in range(count)]


def with_bells(count: int) -> tuple[Credits, list[Doorbell]]:
    credits, rung = Credits(), bells(count)
    for bell in rung:
        credits.add(bell)
    return credits, rung


def test_the_oldest_is_taken_first_and_comes_back_first() -> None:
    credits, (first, second) = with_bells(2)
    assert credits.take() is first
    credits.put_back(first, now=10.0)
    assert len(credits) == 2
    assert [credits.take(), credits.take()] == [first, second]


def test_what_cannot_claim_waits_a_moment() -> None:
    credits, _ = with_bells(1)
    assert credits.due(10.0)
    credits.wait(10.0)
    assert not credits.due(10.0)
    assert credits.due(10.0 + RETRY_S)


def test_what_waits_tells_for_how_long() -> None:
    credits, (bell,) = with_bells(1)
    assert credits.retry_s(10.0) == inf, "it need not"
    credits.take()
    credits.put_back(bell, now=10.0, wait_s=0.5)
    assert credits.retry_s(10.25) == 0.25
    assert credits.retry_s(10.5) == Credits().retry_s(10.0) == inf
    assert credits.due(10.5)


def test_a_new_bell_is_tried_at_once() -> None:
    credits, _ = with_bells(1)
    credits.wait(10.0)
    credits.add(bells(1)[0])
    assert credits.due(10.0)


def test_nothing_is_due_without_bells() -> None:
    assert not Credits().due(10.0)


def test_trim_gives_up_the_oldest_beyond_what_waits() -> None:
    credits, rung = with_bells(4)
    assert credits.trim(3) == rung[:1]
    assert credits.trim(5) == []
    assert credits.trim(0) == rung[1:]
    assert len(credits) == 0


def test_a_task_names_its_request() -> None:
    credits, rung = with_bells(2)
    assert credits.request_of(rung[1].task) == "req_1"
    assert credits.request_of(Task("req_1")) is None
