"""The control thread: credits, claims, leases, mail. It owns every leg of this worker."""

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Any, NamedTuple

from relay.answers import Claim, Renewed, Waiting
from relay.log import event as log_event
from relay.mailbox import Mail
from relay.request import Ring
from relay.rooms import Rooms
from relay.settings import Settings
from relay.worker_card import Load, WorkerCard
from workers.budget import Budget
from workers.calls import AWAY, Calls
from workers.credits import Credits
from workers.doorbell import Doorbell, TaskHandle
from workers.engine.engine import Engine
from workers.engine.messages import Command, Crashed, LegEvent
from workers.legs import Legs
from workers.peers import Peers
from workers.transfer.base import KVManager, RoomEvent

log = logging.getLogger(__name__)

RENEW_EVERY_S = 1.0
TICK_S = 0.05
SPARE_CREDITS = 4
LEASE_MARGIN_S = 0.5  # posts stop this long before the lease of an unreachable worker can have expired


class Order(Enum):
    DRAIN = "drain"
    HAND_BACK = "hand_back"
    STOP = "stop"


class Abort(NamedTuple):
    """Somebody pressed Terminate on this Celery task."""

    task: TaskHandle


class Control:
    """Implements `legs.Desk`. Other threads only call `put` and read `idle`, `active`, `spare` and `load`."""

    def __init__(
        self,
        boot: str,
        settings: Settings,
        rooms: Rooms,
        engine: Engine,
        manager: KVManager,
        card: Callable[[Load], WorkerCard],
        ring: Callable[[Ring], None],
        on_crash: Callable[[BaseException], None],
        on_quarantine_full: Callable[[], None],
    ) -> None:
        self.settings = settings
        self.rooms = rooms
        self.manager = manager
        self._engine = engine
        self._card = card
        self.boot = boot
        self.total_pages = engine.headroom.total_pages
        self.capacity_tokens = engine.headroom.capacity_tokens
        self._ring = ring
        self._on_crash = on_crash
        self._on_quarantine_full = on_quarantine_full
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._calls = Calls()
        self._credits = Credits()
        self._budget = Budget(lambda: engine.headroom)
        self._peers = Peers(rooms.workers, manager.forget_peer)
        self._claiming = False
        self._renew_at = 0.0
        self._epoch = b""
        self.spare = 0  # how many more credits are of use here now
        self._tasks: set[TaskHandle] = set()  # STARTED in Celery: credits and legs
        self._draining_since: float | None = None
        self._restarting = False
        self._stopping = False
        self.legs: Legs

    # ---- from any thread

    def start(self, legs: Legs) -> None:
        self.legs = legs
        self._thread.start()

    def put(self, message: Any) -> None:
        self._inbox.put(message)

    @property
    def active(self) -> int:
        return len(self._tasks)

    @property
    def idle(self) -> bool:
        return self._draining_since is not None and not self._tasks and self.legs.settled()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    # ---- legs.Desk, on this thread

    def call(self, call: Callable[[], Any], then: Callable[[Any], None]) -> None:
        def and_ring(reply: Any) -> None:
            for ring in getattr(reply, "rings", ()):
                self._ring(ring)
            then(reply)

        self._calls.add(call, and_ring)

    def tell(self, command: Command) -> None:
        self._budget.count(command)
        self._engine.submit(command)

    def peer(self, boot: str) -> WorkerCard | None:
        try:
            return self._peers.card(boot)
        except AWAY:
            return None

    def done(self, task: TaskHandle, result: str) -> None:
        self._tasks.discard(task)
        task.succeed(result)

    def failed(self, task: TaskHandle, error: str) -> None:
        self._tasks.discard(task)
        task.fail(error)

    # ---- the loop

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._step()
        except BaseException as error:
            self._on_crash(error)

    def _step(self) -> None:
        with suppress(queue.Empty):
            self._handle(self._inbox.get(timeout=TICK_S))
        now = time.monotonic()
        self._calls.flush()
        self._claim()
        self._calls.flush()
        if now >= self._renew_at:
            self._renew(now)
        self.legs.tick(now)
        self._watch_drain(now)
        self.spare = self._spare()

    def _handle(self, message: Any) -> None:
        match message:
            case Doorbell():
                self._tasks.add(message.task)
                self._credits.add(message)
            case Crashed():
                raise message.error
            case Abort():
                self._abort(message.task)
            case Order():
                self._order(message)
            case _ if isinstance(message, LegEvent):
                self.legs.on_engine(message)
            case _ if isinstance(message, RoomEvent):
                self.legs.on_transfer(message)
            case _ if isinstance(message, Mail):
                self.legs.on_mail(message)
            case _:
                self.legs.on_outcome(message)

    # ---- credits and claims

    def _spare(self) -> int:
        if self._draining_since is not None or len(self._credits) or self.legs.full():
            return 0
        if self._budget.free_tokens < self.settings.page_size:
            return 0
        # Few at a time: a credit that waits here is a credit that another worker cannot use.
        return min(SPARE_CREDITS, max(0, self.settings.max_running - self.active))

    def _claim(self) -> None:
        """Turn one credit into a leg, if there is one and there is room."""
        now = time.monotonic()
        if self._claiming or self._draining_since is not None or not self._credits.due(now):
            return
        free_tokens = self._budget.free_tokens
        if free_tokens <= 0 or self.legs.full():
            self._credits.wait(now)
            return
        self._claiming = True
        bell = self._credits.first
        nonce, room = secrets.token_hex(16), secrets.randbits(63) or 1
        takes, lease_ms, capacity_tokens = self.legs.takes, self.settings.lease_ms, self.capacity_tokens

        def claim() -> Claim | None:
            return self.rooms.claim(
                takes, self.boot, nonce, room, free_tokens, capacity_tokens, lease_ms, bell.request_id
            )

        def then(claim: Claim | None) -> None:
            self._claiming = False
            if claim is None:
                self._credits.wait(time.monotonic())
                self.call(lambda: self.rooms.waiting(takes), self._trim)
                return
            self._credits.remove(bell)
            claimed = claim.claimed
            hold, room, attempt = claimed.hold, claimed.room or None, claimed.attempt
            log_event(log, "claimed", request=hold.request_id, leg=takes, room=room, attempt=attempt)
            self.legs.start(claimed, bell.task)
            self._claim()

        self.call(claim, then)

    def _trim(self, waiting: Waiting) -> None:
        """Credits beyond the legs that wait are of no use: somebody else claimed those legs."""
        for extra in self._credits.trim(waiting.legs):
            self.done(extra.task, "nothing to claim")
        if waiting.retracted:
            self.legs.make_room()

    def _abort(self, task: TaskHandle) -> None:
        request_id = self.legs.request_of(task) or self._credits.request_of(task)
        if request_id is not None:
            self.call(lambda: self.rooms.cancel(request_id), lambda _: None)

    # ---- leases

    def _renew(self, now: float) -> None:
        self._renew_at = now + RENEW_EVERY_S
        deadline = self._engine.heartbeat.deadline
        if deadline is not None and now > deadline:
            log_event(log, "engine_stuck", logging.ERROR, step=self._engine.heartbeat.step)
            return
        holds = self.legs.holds()
        try:
            renewed = self.rooms.renew(self.boot, self.load(), holds, self.settings.lease_ms)
        except AWAY as error:
            log_event(log, "renewal_failed", logging.WARNING, error=error)
            return
        self.manager.posts_until(now + self.settings.lease_ms / 1e3 - LEASE_MARGIN_S)
        self._answer(renewed)

    def _answer(self, renewed: Renewed) -> None:
        if renewed.epoch != self._epoch:
            log_event(log, "redis_epoch", epoch=renewed.epoch.decode())
            self._epoch = renewed.epoch
        if not renewed.known:
            self._calls.add(lambda: self.rooms.register(self._card(self.load())), lambda _: None)
        for ring in renewed.rings:
            self._ring(ring)
        for hold, why in renewed.lost:
            self.legs.on_lost(hold, why)
        for kept in renewed.kept:
            self.legs.on_renewed(kept)

    def load(self) -> Load:
        headroom = self._engine.headroom
        return Load(
            slots=self.spare,
            free_tokens=max(0, headroom.free_tokens),
            running=headroom.running,
            waiting=headroom.waiting + len(self._credits),
            free_pages=headroom.free_pages,
            cached_pages=headroom.cached_pages,
            held_pages=headroom.held_pages,
            quarantined_pages=headroom.quarantined_pages,
        )

    # ---- drain

    def _order(self, order: Order) -> None:
        log_event(log, "order", order=order.value)
        if order is Order.STOP:
            self._stopping = True
            return
        if self._draining_since is None:
            self._draining_since = time.monotonic()
            for bell in self._credits.clear():
                self._ring(Ring(bell.leg, bell.request_id))
                self.done(bell.task, "handed back")
        if order is Order.HAND_BACK:
            self.legs.hand_back()

    def _watch_drain(self, now: float) -> None:
        if self._draining_since is not None and now - self._draining_since > self.settings.grace_s:
            self._draining_since = now
            self.legs.hand_back()
            return
        if self._draining_since is None and not self._restarting and self.legs.quarantine_full(now):
            self._restarting = True
            self._on_quarantine_full()
