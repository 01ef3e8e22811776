"""The ways a process talks to Redis.

redis-py 8 repeats a call whose answer is late, and gives up a blocking read after its socket timeout. So
calls that must answer soon go through `command_client`, and only ones that may run twice; reads that wait go
through a `blocking_client`, which never repeats, and pushes come through a `push_client`.
"""

from queue import Empty
from typing import Any

from redis import BlockingConnectionPool, ConnectionPool, Redis
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.client import PubSub
from redis.exceptions import ConnectionError, MasterDownError, OutOfMemoryError, ReadOnlyError, TimeoutError
from redis.retry import Retry

from relay.redis_url import RedisUrl

# No server, or one that says during a fail-over, or while its memory is full, what it will not say for ever.
AWAY = (ConnectionError, TimeoutError, ReadOnlyError, MasterDownError, OutOfMemoryError)

MAX_BLOCK_MS = 1_000  # how long a read may wait in the server, so that its thread sees a stop request in time
_COMMAND_TIMEOUT_S = 2.0
_HEALTH_CHECK_S = 15
_MAX_CONNECTIONS = 64


class CommandPool(BlockingConnectionPool):
    """Without what redis-py measures and tries of a connection before each call: one that has died meanwhile
    is found by the call itself, which runs again on a new one to the same address. What is to be connected is
    connected here, outside of the call's own tries, which would multiply those of the connection."""

    def get_connection(self, command_name: str | None = None, *keys: Any, **options: Any) -> Any:
        self._checkpid()
        try:
            connection = self.pool.get(timeout=self.timeout)
        except Empty:
            raise ConnectionError("No connection available.") from None
        connection = connection or self.make_connection()  # type: ignore[no-untyped-call]
        try:
            connection.connect()  # which is nothing where it is
        except BaseException:
            self.release(connection)
            raise
        return connection

    def release(self, connection: Any) -> None:
        self._checkpid()
        if not self.owns_connection(connection):
            super().release(connection)  # type: ignore[no-untyped-call]
            return
        if connection.should_reconnect():
            connection.disconnect()
        self.pool.put_nowait(connection)


def command_client(url: str) -> Redis:
    """For calls that may run twice: each is tried two times, so it takes at most about 4 s to fail.

    Any number of threads may call: those beyond the connections wait up to 2 s for one.
    """
    where = RedisUrl.parse(url)
    pool = where.pool(
        BlockingConnectionPool if where.master else CommandPool,  # after a fail-over the address is another
        max_connections=_MAX_CONNECTIONS,
        timeout=_COMMAND_TIMEOUT_S,
        protocol=2,
        socket_timeout=_COMMAND_TIMEOUT_S,
        socket_connect_timeout=_COMMAND_TIMEOUT_S,
        socket_keepalive=True,
        health_check_interval=_HEALTH_CHECK_S,
        retry=Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.2), 1),
    )
    return Redis.from_pool(pool)


def probe_client(url: str, timeout_s: float) -> Redis:
    """For one question that is answered within `timeout_s`, or not at all."""
    pool = RedisUrl.parse(url).pool(
        ConnectionPool,
        protocol=2,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
    )
    return Redis.from_pool(pool)


def blocking_client(url: str) -> Redis:
    """For one thread that waits in the server, up to MAX_BLOCK_MS."""
    return Redis.from_pool(_lone_pool(url))


def push_client(url: str) -> PubSub:
    """For one thread that takes what the server pushes."""
    return PubSub(_lone_pool(url))


def _lone_pool(url: str) -> ConnectionPool:
    return RedisUrl.parse(url).pool(
        ConnectionPool,
        protocol=2,
        socket_timeout=_COMMAND_TIMEOUT_S + MAX_BLOCK_MS / 1000,
        socket_connect_timeout=_COMMAND_TIMEOUT_S,
        socket_keepalive=True,
        retry=Retry(NoBackoff(), 0),
        max_connections=1,
    )
