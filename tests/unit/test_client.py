"""Whether the other end of a connection is there."""

import fcntl
import resource
import socket
from collections.abc import Iterator

import pytest

from app.gateway.client import client_gone

MANY_FILES = 1_500  # beyond what select(2) can look at


@pytest.fixture(params=[0, MANY_FILES])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Server and client, the server's with a number of at least so much."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    low, client = socket.socketpair()
    server = socket.socket(fileno=fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, request.param))
    low.close()
    with server, client:
        yield server, client
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_silent_client_is_there(ends: tuple[socket.socket, socket.socket]) -> None:
    assert not client_gone({"gunicorn.socket": ends[0]})


def test_a_client_that_sends_more_is_there(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[1].send(b"next request")
    assert not client_gone({"gunicorn.socket": ends[0]})
    assert ends[0].recv(4) == b"next", "nothing was taken"


def test_a_client_that_closed_is_gone(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[1].close()
    assert client_gone({"gunicorn.socket": ends[0]})


def test_without_a_socket_nobody_knows() -> None:
    assert not client_gone({})
