"""Sends doorbells on a thread of its own: a broker that is away must not stop the leases."""

import logging
import queue
import threading
from collections.abc import Callable

from relay.request import Ring

log = logging.getLogger(__name__)

MOST_BELLS = 1_000  # that wait


class Ringer:
    """A bell that cannot be sent is dropped, and so is one behind too many that wait: the reaper rings again
    for every leg that nobody claims."""

    def __init__(self, ring: Callable[[Ring], object]) -> None:
        self._send = ring
        self._bells: queue.SimpleQueue[Ring | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ringer", daemon=True)
        self._thread.start()

    def ring(self, bell: Ring) -> None:
        if self._bells.qsize() < MOST_BELLS:
            self._bells.put(bell)

    def stop(self, timeout_s: float) -> None:
        """Send what is queued, then end."""
        self._bells.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (bell := self._bells.get()) is not None:
            try:
                self._send(bell)
            except Exception:
                log.exception("ring_failed request=%s", bell.request_id)
