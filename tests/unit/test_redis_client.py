from typing import Any

import pytest
from redis import Connection
from redis.exceptions import TimeoutError as RedisTimeoutError

from relay.redis_client import command_client


def test_a_server_that_cannot_be_reached_is_tried_two_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try may take two seconds: the call's own must not multiply those of the connection."""
    tries: list[Connection] = []

    def time_out(self: Connection) -> Any:
        tries.append(self)
        raise TimeoutError

    monkeypatch.setattr(Connection, "_connect", time_out)
    client = command_client("redis://127.0.0.1:1")
    for call in range(1, 4):
        with pytest.raises(RedisTimeoutError):
            client.ping()
        assert len(tries) == 2 * call
    assert len(set(map(id, tries))) == 1  # which came back to the pool each time
