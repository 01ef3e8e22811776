"""Room calls of the control thread, in order. An outage of Redis stops this queue, never the thread."""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from redis.exceptions import ConnectionError, MasterDownError, OutOfMemoryError, ReadOnlyError, TimeoutError

from relay.log import event

log = logging.getLogger(__name__)

# Also what a server says during a fail-over, or while its memory is full: it passes.
AWAY = (ConnectionError, TimeoutError, ReadOnlyError, MasterDownError, OutOfMemoryError)
RETRY_S = 0.25


class Calls:
    """Every call may run twice at the server, since a reply can be lost: only idempotent ones belong here."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = deque()
        self._retry_at = 0.0

    def add(self, call: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """`then` gets the reply on the control thread; it may add further calls."""
        self._queue.append((call, then))

    @property
    def away(self) -> bool:
        """The last call found no Redis; the queue waits for the next retry."""
        return self._retry_at > 0.0

    def flush(self) -> None:
        """Run what is queued, in order, until it is empty or Redis is away."""
        if time.monotonic() < self._retry_at:
            return
        while self._queue:
            call, then = self._queue[0]
            try:
                reply = call()
            except AWAY as error:
                event(log, "redis_away", logging.WARNING, error=error, waiting=len(self._queue))
                self._retry_at = time.monotonic() + RETRY_S
                return
            except Exception:
                # The leg stays listed in the next renewal, whose answer settles it.
                log.exception("room_call_failed")
                self._queue.popleft()
                continue
            self._retry_at = 0.0
            self._queue.popleft()
            then(reply)
        self._retry_at = 0.0
