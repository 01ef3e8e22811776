"""KVManager over any transport: hands out senders and receivers, and keeps the metadata rows."""

import time
from collections.abc import Callable, Sequence

from relay.geometry import Geometry, GeometryMismatch
from workers.engine.messages import Computed
from workers.transfer.base import (
    Destination,
    Handshakes,
    KVManager,
    KVReceiver,
    KVSender,
    Seal,
    TransferEvent,
)
from workers.transfer.memory import KVMemory
from workers.transfer.metadata import unpack
from workers.transfer.peer import Peer
from workers.transfer.rows import Rows
from workers.transfer.thread import TransferThread
from workers.transfer.transport import Transport


class TransferManager(KVManager):
    """`receiver`, `release` and `proven` belong to one thread (control)."""

    def __init__(
        self,
        boot: str,
        memory: KVMemory,
        rows: Rows,
        source_rows: Rows,
        transport: Transport,
        post_bytes: int,
        digest: bool = False,
    ) -> None:
        self.memory = memory
        self.rows = rows
        self._here = Peer.here(boot, memory, rows, transport.name, transport.contact)
        self._thread = TransferThread(transport, memory, source_rows, post_bytes, digest)
        self._quarantined: dict[int, list[int]] = {}  # room -> rows

    @property
    def agent_metadata(self) -> bytes:
        return self._here.pack()

    @property
    def handshakes(self) -> Handshakes:
        return self._thread.handshakes

    def start(self, on_event: Callable[[TransferEvent], None]) -> None:
        self._thread.start(on_event)

    def sender(self, room: int, key: str, pages: Sequence[int]) -> "RoomSender":
        self._thread.open(room, tuple(pages))
        return RoomSender(self, self._thread, room, key)

    def receiver(self, room: int, far: bool = False) -> "RoomReceiver":
        row = self.rows.take()
        self._thread.receiving(room, far)
        return RoomReceiver(self, room, row)

    def proven(self, room: int) -> None:
        for row in self._quarantined.pop(room, ()):
            self._give_back(room, row)

    def posts_until(self, deadline_s: float) -> None:
        self._thread.posts_until_s = deadline_s

    def greet_peer(self, metadata: bytes, geometry: Geometry) -> None:
        self._thread.greet(self.peer_of(metadata, geometry))

    def be_greeted(self) -> None:
        self._thread.be_greeted()

    def forget_peer(self, boot: str) -> None:
        self._thread.forget(boot)

    def stop(self) -> None:
        self._thread.stop()

    def peer_of(self, metadata: bytes, geometry: Geometry) -> Peer:
        """The peer behind published metadata, if KV may travel there. Raises GeometryMismatch."""
        self.memory.geometry.check(geometry)
        peer = Peer.unpack(metadata)
        if peer.transport != self._here.transport:
            raise GeometryMismatch(
                f"KV travels by {self._here.transport} here, by {peer.transport} there: "
                "start both with the same transfer backend"
            )
        return peer

    def release(self, room: int, row: int, quarantine: bool) -> None:
        """A receiver is done with its row."""
        if quarantine:
            # The thread goes on polling: without progress here the peer's writes may never reach DONE.
            self._quarantined.setdefault(room, []).append(row)
            self._thread.receiving(room, far=False)  # nobody waits for it now
        else:
            self._give_back(room, row)

    def _give_back(self, room: int, row: int) -> None:
        self.rows.give_back(row)
        self._thread.received(room)


class RoomSender(KVSender):
    def __init__(self, manager: TransferManager, thread: TransferThread, room: int, key: str) -> None:
        self._manager = manager
        self._thread = thread
        self._room = room
        self._key = key

    def bootstrap(self, destination: Destination, peer_metadata: bytes, peer: Geometry) -> None:
        self._thread.bootstrap(self._room, destination, self._manager.peer_of(peer_metadata, peer))

    def computed(self, part: Computed) -> None:
        assert part.key == self._key, f"{part} is not of leg {self._key}"
        self._thread.act(self._room, lambda send: send.state.computed(part))

    def seal(self, seal: Seal) -> None:
        assert seal.room == self._room, f"{seal} is not of room {self._room}"
        now = time.monotonic()
        self._thread.act(self._room, lambda send: send.state.seal(seal, now))

    def close(self) -> None:
        self._thread.act(self._room, lambda send: send.state.close())


class RoomReceiver(KVReceiver):
    def __init__(self, manager: TransferManager, room: int, row: int) -> None:
        self._manager = manager
        self._room = room
        self._row = row
        self._released = False

    @property
    def row(self) -> int:
        return self._row

    def read(self) -> Seal | None:
        assert not self._released
        return unpack(self._manager.rows.read(self._row))

    def verify(self, seal: Seal, pages: Sequence[int]) -> bool:
        return seal.digest == 0 or seal.digest == self._manager.memory.digest(pages)

    def release(self, quarantine: bool) -> None:
        if not self._released:
            self._released = True
            self._manager.release(self._room, self._row, quarantine)
