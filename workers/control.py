"""The control thread: it owns every leg of this worker, and alone makes room calls for them."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection
from enum import Enum
from typing import NamedTuple, TypeVar

from relay.log import event as log_event
from relay.mailbox import Mail, Offered
from relay.redis_client import AWAY
from relay.request import Ring
from relay.rooms import Rooms
from relay.settings import Settings
from relay.worker_card import Load, WorkerCard
from workers.budget import Budget
from workers.calls import Calls
from workers.claims import Claims
from workers.doorbell import Doorbell, TaskHandle
from workers.drain import Drain
from workers.engine.engine import Engine
from workers.engine.messages import Command, Crashed, LegEvent
from workers.leases import Leases
from workers.legs import Desk, Legs, ignore
from workers.output import Outcome
from workers.peers import Peers
from workers.quarantine import Unproven, restart_helps
from workers.transfer.base import KVManager, RoomEvent

log = logging.getLogger(__name__)

TICK_S = 0.05
BATCH = 256  # messages handled before leases are looked at again

T = TypeVar("T")


class Order(Enum):
    DRAIN = "drain"
    HAND_BACK = "hand_back"
    STOP = "stop"


class Abort(NamedTuple):
    """Somebody pressed Terminate on this Celery task."""

    task: TaskHandle


Message = Doorbell | Abort | Order | Crashed | LegEvent | RoomEvent | Mail | Outcome


class Control:
    """Implements `legs.Desk`. Other threads only call `put` and read `idle`, `active`, `spare`, `unproven`,
    `pinned_pages`, `peer_restarts` and `load`."""

    def __init__(
        self,
        boot: str,
        settings: Settings,
        rooms: Rooms,
        engine: Engine,
        manager: KVManager,
        legs: Callable[[Desk], Legs],
        card: Callable[[Load], WorkerCard],
        ring: Callable[[Ring], None],
        on_crash: Callable[[BaseException], None],
        on_quarantine_full: Callable[[], None],
    ) -> None:
        self.boot = boot
        self.settings = settings
        self.rooms = rooms
        self.manager = manager
        self.total_pages = engine.headroom.total_pages
        self.capacity_tokens = engine.headroom.capacity_tokens
        self.spare = 0  # how many more credits are of use here now
        self.unproven: Collection[Unproven] = ()
        self.pinned_pages = 0
        self._engine = engine
        self._ring = ring
        self._on_crash = on_crash
        self._on_quarantine_full = on_quarantine_full
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._tasks: set[TaskHandle] = set()  # STARTED in Celery: credits and legs
        self._calls = Calls()
        self._budget = Budget(lambda: engine.headroom)
        self._peers = Peers(rooms.workers, manager.forget_peer)
        self._legs = legs(self)
        self._claims = Claims(self, self._legs, self._budget)
        self._leases = Leases(self, self._legs, lambda: engine.heartbeat, self.load, card)
        self._drain = Drain(settings.grace_s)
        self._restarting = False
        self._stopping = False

    # ---- from any thread

    def start(self) -> None:
        self._thread.start()

    def put(self, message: Message) -> None:
        self._inbox.put(message)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    @property
    def active(self) -> int:
        return len(self._tasks)

    @property
    def idle(self) -> bool:
        """The drain is over: nothing is owned, in flight or unsaid, or it has taken too long."""
        if not self._drain.begun:
            return False
        return not self._open or self._drain.over(time.monotonic())

    @property
    def _open(self) -> bool:
        """Something is owned, in flight or unsaid."""
        return bool(self._tasks or self._calls) or not self._legs.settled()

    def load(self) -> Load:
        headroom = self._engine.headroom
        return Load(
            slots=self.spare,
            free_tokens=max(0, headroom.free_tokens),
            running=headroom.running,
            waiting=headroom.waiting + len(self._claims),
            free_pages=headroom.free_pages,
            cached_pages=headroom.cached_pages,
            held_pages=headroom.held_pages,
            quarantined_pages=headroom.quarantined_pages,
            pinned_pages=self.pinned_pages,
        )

    @property
    def peer_restarts(self) -> int:
        """How many of the peers that this worker knew have come back as another process."""
        return self._peers.restarts

    # ---- legs.Desk, on this thread

    @property
    def away(self) -> bool:
        return self._calls.away

    def call(self, call: Callable[[], T], then: Callable[[T | None], None]) -> None:
        def and_ring(reply: T | None) -> None:
            for bell in getattr(reply, "rings", ()):
                self._ring(bell)
            then(reply)

        self._calls.add(call, and_ring)

    def ring(self, bell: Ring) -> None:
        self._ring(bell)

    def tell(self, command: Command) -> None:
        self._budget.count(command)
        self._engine.submit(command)

    def peer(self, boot: str) -> WorkerCard | None:
        try:
            return self._peers.card(boot)
        except AWAY:
            return None

    def meet(self, boots: Collection[str]) -> None:
        try:
            self._claims.meet(boots)
            new = self._peers.news(boots)
        except AWAY:  # they are still news to the next renewal
            return
        for card in new:
            self._legs.on_peer(card)

    def room_for(self, tokens: int) -> int:
        if self._drain.begun or self._engine.heartbeat.late(time.monotonic()):
            return 0
        return max(0, min(self._budget.free_tokens // tokens, self.settings.max_running - self.active))

    def fork(self, task: TaskHandle, request_id: str) -> TaskHandle:
        forked = task.fork(request_id)
        self._tasks.add(forked)
        return forked

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
                self._receive()
                self._step()
        except BaseException as error:
            self._on_crash(error)

    def _receive(self) -> None:
        """Handle what has come in; wait for the first of it a moment, or until the next renewal where nothing
        is open and no page waits for proof."""
        ticks = self._open or self.unproven
        now = time.monotonic()
        wait_s = min(TICK_S, self._claims.retry_s(now)) if ticks else max(0.0, self._leases.due_at - now)
        try:
            self._handle(self._inbox.get(timeout=wait_s))
            for _ in range(BATCH):
                self._handle(self._inbox.get_nowait())
        except queue.Empty:
            return

    def _step(self) -> None:
        # A stuck engine's legs go to others when their leases end: it must not claim them back.
        stuck = self._engine.heartbeat.late(time.monotonic())
        if not stuck:
            self._claims.step(time.monotonic())
        self._calls.flush(until=self._leases.due_at)
        if time.monotonic() >= self._leases.due_at:
            self._leases.renew()
        now = time.monotonic()
        self._legs.tick(now)
        self.unproven, self.pinned_pages = self._legs.unproven(), self._legs.pinned_pages()
        self._watch_drain(now)
        self._watch_quarantine(now)
        self.spare = 0 if stuck else self._claims.spare(self.active)

    def _handle(self, message: Message) -> None:
        match message:
            case Doorbell():
                self._tasks.add(message.task)
                self._claims.add(message)
            case Crashed():
                raise message.error
            case Offered():
                self._claims.offered(message.request_id)
            case Abort():
                self._abort(message.task)
            case Order():
                self._order(message)
            case _ if isinstance(message, LegEvent):
                self._legs.on_engine(message)
            case _ if isinstance(message, RoomEvent):
                self._legs.on_transfer(message)
            case _ if isinstance(message, Mail):
                self._legs.on_mail(message)
            case _:
                self._legs.on_outcome(message)

    def _abort(self, task: TaskHandle) -> None:
        request_id = self._legs.request_of(task) or self._claims.request_of(task)
        if request_id is not None:
            self.call(lambda: self.rooms.cancel(request_id), ignore)

    # ---- the end of this worker

    def _order(self, order: Order) -> None:
        log_event(log, "order", order=order.value)
        if order is Order.STOP:
            self._stopping = True
            return
        now = time.monotonic()
        if not self._drain.begun:
            self._claims.close()
        self._drain.begin(now)
        if order is Order.HAND_BACK:
            self._drain.hurry(now)

    def _watch_drain(self, now: float) -> None:
        if self._drain.hands_back(now):
            log_event(log, "handing_back", tasks=self.active)
            self._legs.hand_back()

    def _watch_quarantine(self, now: float) -> None:
        settings = self.settings
        if self._restarting or self._drain.begun:
            return
        share, age_s = settings.quarantine_share, settings.quarantine_age_s
        if restart_helps(self.unproven, self.total_pages, share, age_s, now):
            self._restarting = True
            self._on_quarantine_full()
