"""Room calls in order, over a server that goes away, refuses and comes back."""

import math
from typing import Any

import pytest
from redis.exceptions import (
    ConnectionError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TimeoutError,
)

from workers import calls as module
from workers.calls import Calls


@pytest.fixture(autouse=True)
def _retry_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.0)


class Server:
    """Answers with its number; each error in `troubles` comes first."""

    def __init__(self, *troubles: Exception) -> None:
        self.troubles = list(troubles)
        self.asked: list[int] = []

    def call(self, number: int) -> Any:
        def call() -> int:
            self.asked.append(number)
            if self.troubles:
                raise self.troubles.pop(0)
            return number

        return call


def test_calls_run_in_order_and_replies_may_add_more() -> None:
    server, calls, got = Server(), Calls(), list[int | None]()

    def then(reply: int | None) -> None:
        got.append(reply)
        if reply == 1:
            calls.add(server.call(3), got.append)

    calls.add(server.call(1), then)
    calls.add(server.call(2), then)
    calls.flush(math.inf)
    assert got == [1, 2, 3]
    assert not calls


@pytest.mark.parametrize(
    "error",
    [ConnectionError(), TimeoutError(), ReadOnlyError(), MasterDownError("no master"), OutOfMemoryError()],
)
def test_an_outage_keeps_the_queue_and_its_order(error: Exception) -> None:
    server, calls, got = Server(error, error), Calls(), list[int | None]()
    calls.add(server.call(1), got.append)
    calls.add(server.call(2), got.append)
    for _ in range(2):
        calls.flush(math.inf)
        assert (got, len(calls), calls.away) == ([], 2, True)
    calls.flush(math.inf)
    assert (got, len(calls), calls.away) == ([1, 2], 0, False)
    assert server.asked == [1, 1, 1, 2]


def test_a_call_waits_for_the_next_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", math.inf)
    server, calls = Server(ConnectionError()), Calls()
    calls.add(server.call(1), lambda _: None)
    calls.flush(math.inf)
    calls.flush(math.inf)
    assert server.asked == [1]


def test_a_call_that_is_refused_for_good_answers_none() -> None:
    server, calls, got = Server(ResponseError("wrong type")), Calls(), list[int | None]()
    calls.add(server.call(1), got.append)
    calls.add(server.call(2), got.append)
    calls.flush(math.inf)
    assert got == [None, 2]
    assert not calls.away


def test_an_error_of_a_reply_is_not_swallowed_and_does_not_repeat_the_call() -> None:
    server, calls = Server(), Calls()

    def then(_: int | None) -> None:
        raise ValueError("a bug")

    calls.add(server.call(1), then)
    with pytest.raises(ValueError, match="a bug"):
        calls.flush(math.inf)
    calls.flush(math.inf)
    assert server.asked == [1]


def test_a_long_queue_stops_when_the_leases_are_due() -> None:
    server, calls = Server(), Calls()
    for number in range(3):
        calls.add(server.call(number), lambda _: None)
    calls.flush(until=0.0)
    assert server.asked == [0]
    calls.flush(math.inf)
    assert server.asked == [0, 1, 2]
