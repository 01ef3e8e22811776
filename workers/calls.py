"""Room calls of the control thread, in order. An outage of Redis stops this queue, never the thread."""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from relay.log import event
from relay.redis_client import AWAY

log = logging.getLogger(__name__)

RETRY_S = 0.25

T = TypeVar("T")


class Calls:
    """Every call may run twice at the server, since a reply can be lost: only idempotent ones belong here."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = deque()
        self._retry_at = 0.0
        self.away = False  # the last call found no Redis; the queue waits for the next retry

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, call: Callable[[], T], then: Callable[[T | None], None]) -> None:
        """`then` gets the reply on the control thread, or None if the server refuses the call for good; it
        may add further calls."""
        self._queue.append((call, then))

    def flush(self, until: float) -> None:
        """Run what is queued, in order, until it is empty, Redis is away, or it is `until` (monotonic)."""
        if time.monotonic() < self._retry_at:
            return
        while self._queue:
            call, then = self._queue[0]
            try:
                reply = call()
            except AWAY as error:
                if not self.away:
                    event(log, "redis_away", logging.WARNING, error=error, waiting=len(self._queue))
                self.away = True
                self._retry_at = time.monotonic() + RETRY_S
                return
            except Exception:
                log.exception("room_call_failed")
                reply = None
            self.away = False
            self._queue.popleft()
            then(reply)
            if time.monotonic() >= until:
                return
