"""Credits become legs: one claim at a time, while there is room for another leg."""

import logging
import secrets
import time
from collections.abc import Collection

from relay.answers import Claim, Left, Waiting
from relay.log import event
from relay.request import Claimed, Leg, Ring, Why
from relay.worker_card import role_of
from workers.budget import Budget
from workers.credits import Credits
from workers.doorbell import Doorbell, TaskHandle
from workers.legs import Desk, Legs, ignore

log = logging.getLogger(__name__)

SPARE_CREDITS = 4


class Claims:
    """Owned by the control thread."""

    def __init__(self, desk: Desk, legs: Legs, budget: Budget) -> None:
        self._desk = desk
        self._legs = legs
        self._budget = budget
        self._credits = Credits()
        self._claiming: Doorbell | None = None  # its claim is on the way to the server
        self._latest: Doorbell | None = None  # that came
        self._left = False  # what waits is left to others: these credits wait for nothing of this worker's
        self._shared = False  # others take such legs too
        self._closed = False

    def __len__(self) -> int:
        """Credits that have not become legs."""
        return len(self._credits) + (self._claiming is not None)

    def add(self, bell: Doorbell) -> None:
        self._latest = bell
        if self._closed:
            self._return(bell)
        else:
            self._credits.add(bell)

    def offered(self, request_id: str) -> None:
        """Another worker, which the doorbell of this request came to, leaves it here for a moment."""
        if self._closed or self._latest is None:
            return
        task = self._desk.fork(self._latest.task, request_id)
        self.add(Doorbell(request_id, self._latest.leg, task))

    def meet(self, boots: Collection[str]) -> None:
        """These workers live, this one among them."""
        decodes = self._legs.takes is Leg.DECODE
        self._shared = any(
            (role_of(boot) == "decode") == decodes for boot in boots if boot != self._desk.boot
        )

    def retry_s(self, now: float) -> float:
        """In how many seconds a credit that waits may claim again; inf: none waits for that."""
        return self._credits.retry_s(now)

    def spare(self, active: int) -> int:
        """How many more credits are of use here now, with `active` Celery tasks."""
        held = len(self)
        if self._closed or (held and not self._left) or not self._has_room(self._desk.settings.page_size):
            return 0
        # Few at a time: a credit that waits here is a credit that another worker cannot use.
        return min(max(0, SPARE_CREDITS - held), max(0, self._desk.settings.max_running - active))

    def step(self, now: float) -> None:
        """Turn one credit into a leg, if there is one and there is room."""
        if self._claiming is not None or not self._credits.due(now):
            return
        if not self._has_room(1):
            self._credits.wait(now)
            return
        bell = self._claiming = self._credits.take()
        desk, takes, free_tokens = self._desk, self._legs.takes, self._budget.free_tokens
        nonce, room = secrets.token_hex(16), secrets.randbits(63) or 1
        # A decode worker lacks no time to compute, only to be sent what it has not.
        wait_ms = desk.settings.prefix_wait_ms if self._shared and takes is not Leg.DECODE else 0
        desk.call(
            lambda: desk.rooms.claim(
                takes,
                desk.boot,
                nonce,
                room,
                free_tokens,
                desk.capacity_tokens,
                desk.settings.lease_ms,
                bell.request_id,
                wait_ms,
            ),
            lambda claim: self._claimed(bell, claim),
        )

    def close(self) -> None:
        """Claim nothing more: the worker drains. What claims at this moment is given back when it has."""
        self._closed = True
        for bell in self._credits.trim(0):
            self._return(bell)

    def request_of(self, task: TaskHandle) -> str | None:
        """The request that a credit names."""
        if self._claiming is not None and self._claiming.task is task:
            return self._claiming.request_id
        return self._credits.request_of(task)

    def _has_room(self, tokens: int) -> bool:
        return self._budget.free_tokens >= tokens and not self._legs.full()

    def _claimed(self, bell: Doorbell, claim: Claim | Left | None) -> None:
        self._claiming = None
        self._left = isinstance(claim, Left)
        if claim is None:
            self._refused(bell)
        elif isinstance(claim, Left):
            self._keep(bell, claim)
        elif self._closed:
            hold = claim.claimed.hold
            self._desk.call(lambda: self._desk.rooms.release(hold, Why.DRAIN), ignore)
            self._desk.done(bell.task, "handed back")
        else:
            self._start(claim.claimed, bell)

    def _start(self, claimed: Claimed, bell: Doorbell) -> None:
        event(
            log,
            "claimed",
            request=claimed.hold.request_id,
            leg=self._legs.takes,
            room=claimed.room or None,
            attempt=claimed.attempt,
        )
        self._legs.start(claimed, bell.task)
        self.step(time.monotonic())

    def _keep(self, bell: Doorbell, left: Left) -> None:
        """Until whoever was offered the leg has taken it, or has not in time."""
        if self._closed:
            self._return(bell)
        else:
            self._credits.put_back(bell, time.monotonic(), left.ms / 1e3)

    def _refused(self, bell: Doorbell) -> None:
        if self._closed:
            self._return(bell)
            return
        self._credits.put_back(bell, time.monotonic())
        self._desk.call(lambda: self._desk.rooms.waiting(self._legs.takes), self._trim)

    def _trim(self, waiting: Waiting | None) -> None:
        """Credits beyond the legs that wait are of no use: somebody else claimed those legs."""
        if waiting is None:
            return
        for extra in self._credits.trim(max(0, waiting.legs - (self._claiming is not None))):
            self._desk.done(extra.task, "nothing to claim")
        if waiting.retracted:
            self._legs.make_room()

    def _return(self, bell: Doorbell) -> None:
        """For another worker."""
        self._desk.ring(Ring(bell.leg, bell.request_id))
        self._desk.done(bell.task, "handed back")
