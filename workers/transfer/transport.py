"""What moves bytes beneath a manager: NIXL, or memcpy within one process. Called by one thread."""

from abc import ABC, abstractmethod
from enum import Enum
from typing import Any

from workers.transfer.peer import Peer
from workers.transfer.runs import IndexArray

Handle = Any  # one write; each transport has its own, callers only hand it back


class Table(Enum):
    """What the indices of a write count: blocks of the two pools, or rows (source rows here, rows there)."""

    POOL = "pool"
    ROWS = "rows"


class TransportError(RuntimeError):
    """A write or a connection failed. It says nothing about which bytes have landed or will land."""


class PeerLost(TransportError):
    """The connection to the peer is broken; the next room connects anew."""


class Transport(ABC):
    name: str

    @property
    @abstractmethod
    def contact(self) -> bytes:
        """What a peer needs to reach this transport."""

    def begin(self) -> None:
        """On the thread that makes all later calls, before them."""

    @abstractmethod
    def connect(self, peer: Peer) -> None:
        """Make ready to write to the peer; nothing to do when it is connected. Raises TransportError."""

    @abstractmethod
    def greet(self, boot: str) -> None:
        """Have a word travel to a connected peer, so that the first write finds the way open. Raises
        TransportError."""

    @abstractmethod
    def make(self, boot: str, table: Table, local: IndexArray, remote: IndexArray) -> Handle:
        """A write of `local` to `remote`, both int32 [n]. Nothing is sent yet. Raises TransportError."""

    @abstractmethod
    def post(self, handle: Handle) -> bool:
        """Start the write; True when it is already DONE. After a TransportError any part of it may still
        land."""

    @abstractmethod
    def check(self, handle: Handle) -> bool:
        """True once every byte has landed. Raises TransportError."""

    @abstractmethod
    def release(self, handle: Handle) -> None:
        """Forget a write. One that is not DONE goes on all the same. Never raises."""

    @abstractmethod
    def progress(self) -> None:
        """Let writes advance, also those of peers into this process."""

    @abstractmethod
    def forget(self, boot: str) -> None:
        """Drop the connection to a peer; unknown ones are ignored. Never raises."""

    @abstractmethod
    def close(self) -> None:
        """Drop everything. Never raises."""
