"""A stream says that its end is lost when the reader had the time to find it, and not before."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.gateway import events
from app.gateway.client import ClientGone
from app.gateway.errors import ApiError
from app.gateway.follow import Watch, Watches
from app.gateway.service import Service
from relay.request import State, Token
from relay.tokens import Chunk, End

END = End(State.FINISHED, "", "stop", None, None, None)


@pytest.fixture
def watch() -> Watch:
    return Watch(cast(Any, None), "req-1", 0)


@pytest.fixture
def service() -> Service:
    """One whose Redis says that the request has ended, for clients that stay."""
    rooms = SimpleNamespace(state=lambda _: State.FINISHED)
    departures = SimpleNamespace(watching=lambda *_: nullcontext())
    return cast(Service, SimpleNamespace(rooms=rooms, departures=departures))


def test_redis_that_comes_back_twice_loses_no_end(watch: Watch, service: Service) -> None:
    watch.read_again()
    watch.read_again()
    watch.feed(Chunk([], END), 0)
    assert list(events.events(service, watch, {})) == [None, None, END]


def test_an_end_that_does_not_come_is_lost(
    watch: Watch, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "HEARTBEAT_S", 0.0)
    found = events.events(service, watch, {})
    assert next(found) is None
    with pytest.raises(ApiError) as lost:
        next(found)
    assert lost.value.code == "stream_lost"


def test_one_end_that_does_not_come_is_lost_for_all(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "HEARTBEAT_S", 0.0)
    watches = Watches(cast(Any, None), ["req-1", "req-1-1"])
    found = events.events_of_all(service, watches, {})
    watches.each[1].feed(Chunk([Token(0, 5, "x")], END), 0)
    assert [next(found), next(found)] == [(1, [Token(0, 5, "x")]), (1, END)]
    assert next(found) is None
    with pytest.raises(ApiError) as lost:
        next(found)
    assert lost.value.code == "stream_lost"


def test_a_client_that_leaves_ends_it_whatever_else_has_come(watch: Watch, service: Service) -> None:
    watch.feed(Chunk([Token(0, 5, "x")], None), 0)
    watch.inbox.leave()
    found = events.events(service, watch, {})
    assert next(found) == [Token(0, 5, "x")]
    with pytest.raises(ClientGone):
        next(found)


def test_several_streams_are_over_when_each_has_ended(service: Service) -> None:
    watches = Watches(cast(Any, None), ["req-1", "req-1-1"])
    for watch in watches.each:
        watch.read_again()
        watch.feed(Chunk([], END), 0)
    found = list(events.events_of_all(service, watches, {}))
    assert found == [None, (0, END), None, (1, END)]
