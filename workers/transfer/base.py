"""The relay's transport, as the control thread sees it: one KVManager per process, a KVSender or KVReceiver per room.

A manager runs the transfer thread, which alone touches the transport. Senders and receivers are handles: their methods
only put a message into that thread's queue. Events come back through `on_event`, called on the transfer thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from relay.geometry import Geometry
from workers.engine.messages import Computed, Sampled


class Seal(NamedTuple):
    """The metadata row: written after the last page is DONE; KV is complete only when it matches the room."""

    room: int
    attempt: int
    nonce: int  # first 63 bits of the decode claim's nonce, as published
    position: int  # output position of `first`
    tokens: int  # KV tokens written: prompt ⧺ emitted
    pages: int
    first: Sampled
    cached_tokens: int
    digest: int = 0  # over the pages when the digest is on, else 0


class Destination(NamedTuple):
    """What the decode worker published in the room."""

    boot: str
    pages: tuple[int, ...]  # page ids there, by position
    row: int
    nonce: int


class Sent(NamedTuple):
    """Every page handle and the row are DONE and the room is closed to posts."""

    room: int
    bytes: int
    descriptors: int
    exposed_us: int  # from the end of compute to the row's DONE


class SendFailed(NamedTuple):
    """A handle ended in an error: the room is closed to posts, its source pages stay pinned until `Settled` or the
    peer is dead. `error` names what happened."""

    room: int
    error: str


class Settled(NamedTuple):
    """After `close`: every handle posted for the room reached DONE (or none was posted). Proof for the reader."""

    room: int


TransferEvent = Sent | SendFailed | Settled


class PeerUnknown(LookupError):
    """The peer's card is gone from Redis: it is dead or was never registered."""


class KVSender(ABC):
    """The prefill side of one room."""

    @abstractmethod
    def bootstrap(self, destination: Destination, peer_metadata: bytes, peer: Geometry) -> None:
        """The decode worker's pages are known; what was computed so far goes out at once. Raises GeometryMismatch."""

    @abstractmethod
    def computed(self, part: Computed) -> None:
        """These layers of these pages may be read; sent now, or kept until bootstrap. Called on the engine thread."""

    @abstractmethod
    def seal(self, seal: Seal) -> None:
        """Compute is over: when all pages are DONE write the row; then the event is Sent."""

    @abstractmethod
    def close(self) -> None:
        """No further post. The event is Settled once every posted handle is DONE; idempotent."""


class KVReceiver(ABC):
    """The decode side of one room, from publish to seal."""

    @property
    @abstractmethod
    def row(self) -> int: ...

    @abstractmethod
    def read(self) -> Seal | None:
        """The row as it stands, or None while it is still poisoned or torn."""

    @abstractmethod
    def release(self, quarantine: bool) -> None:
        """Give the row back; with `quarantine` only when `proven(room)` is called."""


class KVManager(ABC):
    """One per process incarnation, named by its boot id."""

    @property
    @abstractmethod
    def agent_metadata(self) -> bytes: ...

    @abstractmethod
    def start(self, on_event: Callable[[TransferEvent], None]) -> None: ...

    @abstractmethod
    def sender(self, room: int, key: str, pages: Sequence[int]) -> KVSender:
        """`pages`: the source pages by position. `key` names the leg in Computed messages."""

    @abstractmethod
    def receiver(self, room: int) -> KVReceiver:
        """Takes a metadata row and poisons it. Raises RowsExhausted when none is free."""

    @abstractmethod
    def proven(self, room: int) -> None:
        """No write of this room can come any more: its quarantined row is free again."""

    @abstractmethod
    def forget_peer(self, boot: str) -> None:
        """The peer is dead: drop its agent. Handles in flight to it end in SendFailed."""

    @abstractmethod
    def stop(self) -> None: ...


class RowsExhausted(RuntimeError):
    """Every metadata row is taken (or quarantined): hand the leg back."""
