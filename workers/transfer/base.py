"""The relay's transport, as control sees it: a KVManager per process, a KVSender or KVReceiver per room.

A manager runs the transfer thread, which alone touches the transport. Senders and receivers are handles:
their methods only put a message into that thread's queue. Events come back through `on_event`, called on it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from relay.geometry import Geometry
from relay.stretches import Stretch
from workers.engine.messages import Computed, Crashed, Sampled


class Seal(NamedTuple):
    """The metadata row: written after the last page is DONE; KV is complete only when it matches the room."""

    room: int
    attempt: int
    nonce: int  # `seal_nonce` of the decode claim
    position: int  # output position of `first`
    tokens: int  # KV tokens written: prompt ⧺ emitted
    pages: int
    first: Sampled
    cached_tokens: int
    digest: int = 0  # over the pages that were sent when the digest is on, else 0


class Destination(NamedTuple):
    """What the decode worker published in the room: the pages from position `first_page` on. It has the KV
    of those before."""

    boot: str
    pages: tuple[int, ...]  # page ids there, by position
    row: int
    nonce: int
    first_page: int = 0


class Sent(NamedTuple):
    """Every page handle and the row are DONE: nothing is left to post, and nothing in flight. Of pages that
    the decode worker had, `spared_bytes` were not sent."""

    room: int
    bytes: int  # of pages
    descriptors: int  # pieces the pages went out in, neighbours merged
    exposed_us: int  # from the end of compute to the row's DONE
    sends: tuple[Stretch, ...] = ()  # when they were posted and DONE, monotonic seconds; the row is the last
    flying_us: int = 0  # while a write of pages was in flight
    posting_us: int = 0  # the calls that started them
    spared_bytes: int = 0


class SendFailed(NamedTuple):
    """The room cannot be sent, told once: it is closed to posts, its source pages stay pinned until `Settled`
    (which comes after `close`, and only if every handle reaches DONE) or the peer is dead. `error` names what
    happened."""

    room: int
    error: str
    sends: tuple[Stretch, ...] = ()


class Settled(NamedTuple):
    """After `close`: every handle posted for the room reached DONE (or none was posted). Proof for the
    reader. A room whose handle ended in an error never settles: an error does not say that nothing lands any
    more."""

    room: int


RoomEvent = Sent | SendFailed | Settled
# Crashed: the transfer thread ended; the process must exit.
TransferEvent = RoomEvent | Crashed


def seal_nonce(nonce: str) -> int:
    """The first 60 bits of a claim's nonce (hex): what the seal repeats of it."""
    return int(nonce[:15], 16)


class Handshakes(NamedTuple):
    """Connections to peers that were made, and that could not be."""

    ok: int = 0
    failed: int = 0


class KVSender(ABC):
    """The prefill side of one room."""

    @abstractmethod
    def bootstrap(self, destination: Destination, peer_metadata: bytes, peer: Geometry) -> None:
        """The decode worker's pages are known; what was computed so far goes out at once. Idempotent.

        `peer_metadata` is the `agent_metadata` of the manager `destination.boot` names, `peer` its geometry.
        Raises GeometryMismatch; whatever else is wrong with the destination ends in SendFailed.
        """

    @abstractmethod
    def computed(self, part: Computed) -> None:
        """These layers of these pages may be read; sent now, or after bootstrap. Called on the engine thread.

        Parts come in any order, but no block twice: handles have no order, so an older copy could land last.
        """

    @abstractmethod
    def seal(self, seal: Seal) -> None:
        """Compute is over: once `seal.pages` pages are computed and every page handle is DONE the row is
        written, also where none had to be sent; then the event is Sent. The manager fills in the digest."""

    @abstractmethod
    def close(self) -> None:
        """No further post, at any time, also after Sent or SendFailed: the manager forgets the room after
        this. The event is Settled once every posted handle is DONE; idempotent. A room whose peer was
        forgotten tells nothing."""


class KVReceiver(ABC):
    """The decode side of one room, from publish to seal."""

    @property
    @abstractmethod
    def row(self) -> int: ...

    @abstractmethod
    def read(self) -> Seal | None:
        """The row as it stands, or None while it is still poisoned or torn."""

    @abstractmethod
    def verify(self, seal: Seal, pages: Sequence[int]) -> bool:
        """Whether `pages`, those that were published, hold what the seal's digest says; True when it has
        none."""

    @abstractmethod
    def release(self, quarantine: bool) -> None:
        """Give the row back; with `quarantine` only when `proven(room)` is called. Idempotent."""


class KVManager(ABC):
    """One per process incarnation, named by its boot id."""

    @property
    @abstractmethod
    def agent_metadata(self) -> bytes:
        """What a peer needs to write into this pool; published in the worker's card."""

    @property
    @abstractmethod
    def handshakes(self) -> Handshakes:
        """So far; any thread may ask."""

    @abstractmethod
    def start(self, on_event: Callable[[TransferEvent], None]) -> None: ...

    @abstractmethod
    def sender(self, room: int, key: str, pages: Sequence[int]) -> KVSender:
        """`pages`: the source pages by position. `key` names the leg in Computed messages."""

    @abstractmethod
    def receiver(self, room: int, far: bool = False) -> KVReceiver:
        """Takes a metadata row and poisons it. `far`: what writes is on another host, and each step of it
        waits for this side to look. Raises RowsExhausted when none is free."""

    @abstractmethod
    def proven(self, room: int) -> None:
        """No write of this room can come any more: its quarantined row is free again."""

    @abstractmethod
    def posts_until(self, deadline_s: float) -> None:
        """No post starts after `deadline_s` (monotonic seconds) until a later one is set: the end of the
        worker's leases as it last knew them. Without a call there is no deadline."""

    @abstractmethod
    def greet_peer(self, metadata: bytes, geometry: Geometry) -> None:
        """Connect to a peer that will be written to, named as in `bootstrap`. Returns at once; what fails is
        tried again by the first room. Raises GeometryMismatch."""

    @abstractmethod
    def be_greeted(self) -> None:
        """A peer that will write here has appeared and connects now."""

    @abstractmethod
    def forget_peer(self, boot: str) -> None:
        """The peer is dead: drop its agent. Rooms not yet sent to it end in SendFailed, and no room of it
        settles if something was in flight."""

    @abstractmethod
    def stop(self) -> None:
        """Release every handle and leave the transport; returns within seconds, whatever is in flight."""


class RowsExhausted(RuntimeError):
    """Every metadata row is taken (or quarantined): hand the leg back."""
