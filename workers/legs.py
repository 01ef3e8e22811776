"""What the control thread asks of the legs of a role, and what a role may use of the control thread."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Protocol, TypeVar

from relay.answers import Kept
from relay.mailbox import Mail
from relay.request import Claimed, Hold, Leg, Ring, State, Why
from relay.rooms import Rooms
from relay.settings import Settings
from relay.stamps import Stamps
from relay.worker_card import WorkerCard
from workers.doorbell import TaskHandle
from workers.engine.messages import Command, LegEvent, Work
from workers.output import Outcome
from workers.quarantine import Unproven
from workers.transfer.base import KVManager, RoomEvent

T = TypeVar("T")

# Reasons for which a leg ends with nothing having gone wrong at this worker.
_CALM = {Why.DRAIN, Why.PRESSURE, Why.RETRACT, State.CANCELLED, State.FINISHED, "done", "requeued"}


class Desk(Protocol):
    """The control thread's services; everything here is called on that thread."""

    settings: Settings
    rooms: Rooms
    manager: KVManager
    boot: str
    total_pages: int
    capacity_tokens: int

    @property
    def away(self) -> bool:
        """Redis cannot be reached at the moment: what is called waits."""

    def call(self, call: Callable[[], T], then: Callable[[T | None], None]) -> None:
        """Queue one idempotent room call; `then` gets its reply, or None if it is refused for good."""

    def ring(self, bell: Ring) -> None:
        """Send a doorbell."""

    def tell(self, command: Command) -> None:
        """Send one command to the engine thread."""

    def peer(self, boot: str) -> WorkerCard | None:
        """The card of another worker, read once; None when it is not alive."""

    def meet(self, boots: Collection[str]) -> None:
        """These workers live: the legs are told of those that are new, and the dead are forgotten."""

    def room_for(self, tokens: int) -> int:
        """How many more legs may begin here now that need `tokens` tokens each."""

    def fork(self, task: TaskHandle, request_id: str) -> TaskHandle:
        """Begin a Celery task beside `task`."""

    def done(self, task: TaskHandle, result: str) -> None:
        """End a Celery task as SUCCESS."""

    def failed(self, task: TaskHandle, error: str) -> None:
        """End a Celery task as FAILURE."""


class Legs(ABC):
    """The legs of one role that this worker owns; a state machine that lives on the control thread."""

    takes: Leg

    @abstractmethod
    def start(self, claimed: Claimed, task: TaskHandle) -> None:
        """This worker owns the leg from now on."""

    @abstractmethod
    def on_engine(self, event: LegEvent) -> None: ...

    def on_transfer(self, event: RoomEvent) -> None:
        raise AssertionError(f"a {self.takes} worker sends nothing: {event}")

    def on_mail(self, mail: Mail) -> None:
        raise AssertionError(f"a {self.takes} worker gets no mail: {mail}")

    def on_outcome(self, outcome: Outcome) -> None:
        raise AssertionError(f"a {self.takes} worker emits nothing: {outcome}")

    @abstractmethod
    def on_lost(self, hold: Hold, why: str) -> None:
        """The server says that this leg is no longer ours."""

    def on_peer(self, peer: WorkerCard) -> None:
        """A worker has appeared that this one had not seen."""

    def on_renewed(self, kept: Kept) -> None:
        """The leg is still ours; the room's state tells what a lost mail would have told."""

    @abstractmethod
    def holds(self) -> list[Hold]:
        """Every leg this worker believes in."""

    def progress(self) -> Mapping[str, Stamps]:
        """What was done for legs whose prompt is being computed, by the nonce of their claim."""
        return {}

    @abstractmethod
    def request_of(self, task: TaskHandle) -> str | None:
        """Which request a Celery task runs."""

    @abstractmethod
    def hand_back(self) -> None:
        """Give every leg back to its queue now."""

    def tick(self, now: float) -> None:
        """Called about every 50 ms while anything is open; `now` in monotonic seconds."""

    def full(self) -> bool:
        """No further claim now, whatever the pool has free."""
        return False

    def make_room(self) -> None:
        """A retracted request waits in the queue and does not fit here."""

    def pinned_pages(self) -> int:
        """Pages that a peer writes, or that are sent to one."""
        return 0

    def unproven(self) -> Collection[Unproven]:
        """Pages that wait for proof that no write touches them any more."""
        return ()

    @abstractmethod
    def settled(self) -> bool:
        """Nothing is owned and nothing of this worker is in flight."""


def work_of(claimed: Claimed) -> Work:
    """What the engine is told of a leg; its key is the nonce of the claim."""
    return Work(
        claimed.hold.nonce,
        claimed.hold.request_id,
        claimed.prompt_ids,
        claimed.emitted,
        claimed.params,
        claimed.solo,
        claimed.submitted_ms,
        claimed.clock.at_s + claimed.left_ms / 1000,
    )


def is_calm(why: str) -> bool:
    """Whether a leg that ends for this reason is a success to those who watch."""
    return why in _CALM


def ignore(_: object) -> None:
    """A reply that changes nothing here."""
