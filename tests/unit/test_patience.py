"""A connection whose time is over reads as if its client had closed it, and no other."""

import socket

from app.gateway.patience import Patience

DEADLINE_S = 10.0


def test_who_takes_too_long_is_read_no_more() -> None:
    patience = Patience(look_s=0.01)
    (slow, its_client), (quick, _client) = socket.socketpair(), socket.socketpair()
    for each in (slow, quick):
        each.settimeout(DEADLINE_S)
    with patience.of(quick, DEADLINE_S), patience.of(slow, 0.0):
        its_client.send(b"a")
        while slow.recv(1):
            pass
        slow.send(b"too slow")
        assert its_client.recv(8) == b"too slow"
        _client.send(b"b")
        assert quick.recv(1) == b"b"


def test_whose_time_was_not_over_reads_on() -> None:
    patience = Patience(look_s=0.01)
    (done, its_client), (slow, _client) = socket.socketpair(), socket.socketpair()
    done.settimeout(DEADLINE_S)
    with patience.of(done, 0.02):
        pass
    with patience.of(None, 0.0), patience.of(slow, 0.05):
        assert slow.recv(1) == b"", "by then the time of the first would have been over"
    its_client.send(b"a")
    assert done.recv(1) == b"a"
