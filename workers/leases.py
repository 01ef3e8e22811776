"""Lease renewal: one call for all legs of this worker, whose answer says which it still owns."""

import logging
import time
from collections.abc import Callable

from relay.answers import Renewed
from relay.log import event
from relay.redis_client import AWAY
from relay.worker_card import Load, WorkerCard
from workers.engine.messages import Heartbeat
from workers.legs import Desk, Legs, ignore

log = logging.getLogger(__name__)

RENEW_EVERY_S = 1.0
STUCK_S = 60.0
LEASE_MARGIN_S = 0.5  # posts stop this long before the lease of an unreachable worker can have expired


class EngineStuck(RuntimeError):
    """The engine does not come back. Others can prove that it writes nothing only when its process is
    gone."""


class Leases:
    """Owned by the control thread."""

    def __init__(
        self,
        desk: Desk,
        legs: Legs,
        heartbeat: Callable[[], Heartbeat],
        load: Callable[[], Load],
        card: Callable[[Load], WorkerCard],
    ) -> None:
        self._desk = desk
        self._legs = legs
        self._heartbeat = heartbeat
        self._load = load
        self._card = card
        self._epoch = b""
        self.due_at = 0.0  # monotonic seconds

    def renew(self) -> None:
        """Unless the engine is stuck: then the legs go to another worker. Raises EngineStuck when it stays
        so."""
        now = time.monotonic()
        self.due_at = now + RENEW_EVERY_S
        heartbeat = self._heartbeat()
        if heartbeat.late(now):
            event(log, "engine_stuck", logging.ERROR, step=heartbeat.step)
            if heartbeat.late(now - STUCK_S):
                raise EngineStuck(f"step {heartbeat.step} is {STUCK_S:g} s late: this process ends")
            return
        desk, lease_ms = self._desk, self._desk.settings.lease_ms
        try:
            holds, progress = self._legs.holds(), self._legs.progress()
            renewed = desk.rooms.renew(desk.boot, self._load(), holds, lease_ms, progress)
        except AWAY as error:
            event(log, "renewal_failed", logging.WARNING, error=error)
            return
        self._answer(renewed)
        # Only now: a worker that was stopped for long closes what it lost before it posts again.
        desk.manager.posts_until(now + lease_ms / 1e3 - LEASE_MARGIN_S)

    def _answer(self, renewed: Renewed) -> None:
        if renewed.epoch != self._epoch:
            event(log, "redis_epoch", epoch=renewed.epoch.decode())
            self._epoch = renewed.epoch
        if not renewed.known:
            self._desk.call(lambda: self._desk.rooms.register(self._card(self._load())), ignore)
        for ring in renewed.rings:
            self._desk.ring(ring)
        for hold, why in renewed.lost:
            self._legs.on_lost(hold, why)
        for kept in renewed.kept:
            self._legs.on_renewed(kept)
        self._desk.meet(renewed.workers)
