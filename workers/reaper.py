"""What was lost is rung again: a bootstep in every worker that expires leases and repeats doorbells."""

import logging
import threading
from collections.abc import Callable
from typing import Any

from celery import bootsteps
from redis.exceptions import RedisError

from relay import celery
from relay.log import event
from relay.request import Ring
from relay.rooms import Rooms
from relay.settings import Settings
from workers.ringer import Ringer

log = logging.getLogger(__name__)

PERIOD_S = 0.5


class Reaper(bootsteps.StartStopStep):  # type: ignore[misc]
    """Every worker runs one, so that one living worker is enough; the server lets none reap twice."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reaper", daemon=True)

    def start(self, worker: Any) -> None:
        self._thread.start()

    def stop(self, worker: Any) -> None:
        self._stopping.set()

    terminate = stop

    def _run(self) -> None:
        settings = Settings.from_env()
        rooms, ringer = Rooms(settings.redis_url, settings.model_name), Ringer(celery.ring)
        failing = False
        while not self._stopping.wait(PERIOD_S):
            try:
                reap(rooms, settings, ringer.ring)
                failing = False
            except Exception as error:  # nobody would miss this thread, and no lease would end any more
                if not failing:
                    event(log, "reaper_waits", logging.WARNING, error=error)
                    if not isinstance(error, RedisError):
                        log.exception("reaper_failed")
                failing = True
        ringer.stop(timeout_s=0.0)
        rooms.close()


def reap(rooms: Rooms, settings: Settings, ring: Callable[[Ring], object]) -> None:
    """One round; `ring` waits for nothing. Raises RedisError; the next round then does what this one left."""
    reaped = rooms.reap(settings.lease_ms, settings.suspect_after)
    for request_id in reaped.expired:
        event(log, "lease_expired", logging.WARNING, request=request_id)
    for request_id in reaped.failed:
        event(log, "request_failed", logging.WARNING, request=request_id)
    for bell in reaped.rings:
        ring(bell)
