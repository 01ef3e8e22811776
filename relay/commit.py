"""Waits for the server's disk, one wait for all threads that come together."""

import re
import time
from concurrent.futures import Future
from threading import Lock

from redis import Redis
from redis.exceptions import ResponseError

from relay.functions import UnsupportedServer

_NEVER = re.compile("appendonly|unknown command")  # what else is refused passes, as by a new replica
_GAP_S = 0.025  # with `everysec` a wait may take a second, and has a connection for so long


class GroupCommit:
    """Thread-safe. A wait that begins covers whatever the server had answered before.

    The first thread that comes is the one that waits for all who join it: at once, or, where another wait has
    just begun, a moment later.
    """

    def __init__(self, redis: Redis, root: str) -> None:
        """`root` of the keys of one model."""
        self._redis = redis
        self._key = f"{root}:synced"
        self._lock = Lock()
        self._next: Future[bool] | None = None
        self._begins = 0.0  # the last one, monotonic seconds

    def wait(self, timeout_ms: int) -> bool:
        """Until all that was written before is on the server's disk. False: it was not in time.

        Raises what redis-py raises, and UnsupportedServer for a server that has no append-only file, or no
        WAITAOF: before Redis 7.2.
        """
        with self._lock:
            joined = self._next
            commit = self._next = joined or Future()
            if joined is None:
                self._begins = max(time.monotonic(), self._begins + _GAP_S)
        if joined is None:
            self._lead(commit, timeout_ms)
        return commit.result()

    def _lead(self, commit: Future[bool], timeout_ms: int) -> None:
        time.sleep(max(0.0, self._begins - time.monotonic()))
        with self._lock:
            self._next = None  # who comes now may have written behind what this one waits for
        try:
            commit.set_result(self._on_disk(timeout_ms))
        except BaseException as error:
            commit.set_exception(error)

    def _on_disk(self, timeout_ms: int) -> bool:
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.set(self._key, 1)  # WAITAOF is about the last write of its own connection
        pipeline.execute_command("WAITAOF", 1, 0, timeout_ms)  # type: ignore[no-untyped-call]
        written, waited = pipeline.execute(raise_on_error=False)
        if isinstance(written, Exception):
            raise written
        if isinstance(waited, ResponseError) and _NEVER.search(str(waited)):
            raise UnsupportedServer(f"ACCEPT_SYNC needs appendonly yes and WAITAOF: {waited}") from waited
        if isinstance(waited, Exception):
            raise waited
        on_disk, _ = waited
        return bool(on_disk)
