"""Whether the other end of a connection is there."""

import fcntl
import queue
import resource
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from app.gateway.client import Departures

MANY_FILES = 1_500  # beyond what select(2) can look at
FREE_NUMBER = 900  # far above what tests have open
DEADLINE_S = 10.0

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def departures() -> Iterator[Departures]:
    found = Departures()
    yield found
    found.close()


def connected() -> Ends:
    """Server and client."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        return listener.accept()[0], client


def numbered(connection: socket.socket, least: int) -> socket.socket:
    """The same connection, at that number or the next that is free."""
    return socket.socket(fileno=fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, least))


@pytest.fixture(params=[0, MANY_FILES])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """The server's with a number of at least so much."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    low, client = connected()
    server = numbered(low, request.param)
    low.close()
    with server, client:
        yield server, client
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def environ(server: socket.socket) -> dict[str, Any]:
    return {"gunicorn.socket": server}


def wait_for_a_departure(departures: Departures) -> None:
    """Of another client: who had left before it would have been told of by now."""
    told: queue.SimpleQueue[None] = queue.SimpleQueue()
    server, client = connected()
    with server, departures.watching(environ(server), lambda: told.put(None)):
        client.close()
        told.get(timeout=DEADLINE_S)


def test_a_client_that_closes_is_told_of(departures: Departures, ends: Ends) -> None:
    told: queue.SimpleQueue[None] = queue.SimpleQueue()
    with departures.watching(environ(ends[0]), lambda: told.put(None)):
        ends[1].close()
        told.get(timeout=DEADLINE_S)
        wait_for_a_departure(departures)
        assert told.empty(), "once"


def test_one_that_had_closed_before_is_told_of(departures: Departures, ends: Ends) -> None:
    told: queue.SimpleQueue[None] = queue.SimpleQueue()
    ends[1].close()
    with departures.watching(environ(ends[0]), lambda: told.put(None)):
        told.get(timeout=DEADLINE_S)


def test_one_that_had_sent_more_before_it_closed_is_told_of(departures: Departures, ends: Ends) -> None:
    told: queue.SimpleQueue[None] = queue.SimpleQueue()
    with departures.watching(environ(ends[0]), lambda: told.put(None)):
        ends[1].send(b"next request")
        ends[1].close()
        told.get(timeout=DEADLINE_S)


def test_a_silent_client_and_one_that_sends_more_are_there(departures: Departures, ends: Ends) -> None:
    told: queue.SimpleQueue[None] = queue.SimpleQueue()
    with departures.watching(environ(ends[0]), lambda: told.put(None)):
        wait_for_a_departure(departures)
        ends[1].send(b"next request")
        wait_for_a_departure(departures)
        assert told.empty()
    assert ends[0].recv(4) == b"next", "nothing was taken"


def test_nobody_is_told_who_does_not_wait_any_more(departures: Departures, ends: Ends) -> None:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in ("first", "second"):
        with departures.watching(environ(ends[0]), lambda name=name: told.put(name)):
            wait_for_a_departure(departures)
    with departures.watching(environ(ends[0]), lambda: told.put("third")):
        ends[1].close()
        assert told.get(timeout=DEADLINE_S) == "third"
    wait_for_a_departure(departures)
    assert told.empty()


def test_who_ends_late_does_not_end_the_next_at_its_number(departures: Departures) -> None:
    told: queue.SimpleQueue[None] = queue.SimpleQueue()
    low, client = connected()
    server = numbered(low, FREE_NUMBER)
    late = departures.watching(environ(server), lambda: None)
    late.__enter__()
    for each in (low, server, client):
        each.close()
    low, its_client = connected()
    again = numbered(low, FREE_NUMBER)
    assert again.fileno() == FREE_NUMBER
    with low, again, departures.watching(environ(again), lambda: told.put(None)):
        late.__exit__(None, None, None)
        its_client.close()
        told.get(timeout=DEADLINE_S)


def test_without_a_socket_nobody_knows(departures: Departures) -> None:
    with departures.watching({}, lambda: pytest.fail("told")):
        wait_for_a_departure(departures)
