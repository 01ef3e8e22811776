"""The transfer thread: it owns every send, asks each room's state what to post, and tells what is DONE."""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from relay.geometry import Geometry, GeometryMismatch
from relay.log import event
from workers.engine.messages import Computed, Crashed
from workers.transfer.base import Destination, KVManager, KVReceiver, KVSender, Seal, TransferEvent
from workers.transfer.memory import KVMemory
from workers.transfer.metadata import pack, unpack
from workers.transfer.peer import Peer
from workers.transfer.room_state import Post, RoomState, RowPost
from workers.transfer.rows import Rows
from workers.transfer.transport import Handle, PeerLost, Table, Transport, TransportError

log = logging.getLogger(__name__)

POST_BYTES = 64 << 20
SEND_POLL_S = 0.001
RECEIVE_POLL_S = 0.002
STOP_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A posted write. `source_row` holds the seal until it has landed."""

    post: Post
    handle: Handle
    source_row: int | None


@dataclass(slots=True)
class Send:
    """One room as the transfer thread keeps it. A lost flight ended in an error: it may still write."""

    state: RoomState
    pages: tuple[int, ...]
    flights: list[Flight] = field(default_factory=list)
    lost: list[Flight] = field(default_factory=list)
    peer_gone: bool = False

    @property
    def peer(self) -> str | None:
        return self.state.destination.boot if self.state.destination else None

    @property
    def moves(self) -> bool:
        """A post, a handle or a connection may advance."""
        state = self.state
        waits = state.destination is not None and not (state.closed or state.error or state.complete)
        return waits or bool(self.flights)

    @property
    def over(self) -> bool:
        return self.state.finished or (self.state.closed and self.peer_gone)


class TransferManager(KVManager):
    """A KVManager over any Transport. `receiver`, `release` and `proven` belong to one thread (control)."""

    def __init__(
        self,
        boot: str,
        memory: KVMemory,
        rows: Rows,
        source_rows: Rows,
        transport: Transport,
        post_bytes: int = POST_BYTES,
        digest: bool = False,
    ) -> None:
        self.boot = boot
        self.memory = memory
        self.rows = rows
        self._source_rows = source_rows
        self._transport = transport
        self._block_bytes = memory.geometry.layer_page_bytes
        self._post_blocks = max(1, post_bytes // self._block_bytes)
        self._digest = digest
        self._here = Peer.here(boot, memory, rows, transport.name, transport.contact)
        self._quarantined: dict[int, int] = {}  # room -> row, the caller's
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)
        self._posts_until_s = math.inf
        # From here on the transfer thread's own.
        self._on_event: Callable[[TransferEvent], None] = lambda _: None
        self._sends: dict[int, Send] = {}
        self._receiving: set[int] = set()
        self._broken: set[str] = set()
        self._stopping = False

    # ---- KVManager

    @property
    def agent_metadata(self) -> bytes:
        return self._here.pack()

    def start(self, on_event: Callable[[TransferEvent], None]) -> None:
        self._on_event = on_event
        self._thread.start()

    def sender(self, room: int, key: str, pages: Sequence[int]) -> "RoomSender":
        self.submit(partial(self._open, room, tuple(pages)))
        return RoomSender(self, room, key)

    def receiver(self, room: int) -> "RoomReceiver":
        row = self.rows.take()
        self.submit(partial(self._receiving.add, room))
        return RoomReceiver(self, room, row)

    def proven(self, room: int) -> None:
        row = self._quarantined.pop(room, None)
        if row is not None:
            self._give_back(room, row)

    def posts_until(self, deadline_s: float) -> None:
        self._posts_until_s = deadline_s

    def forget_peer(self, boot: str) -> None:
        self.submit(partial(self._forget, boot, f"decode worker {boot} is gone"))

    def stop(self) -> None:
        if not self._thread.is_alive():
            return
        self.submit(self._set_stopping)
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            event(log, "transfer_stuck", logging.ERROR, boot=self.boot, waited_s=STOP_S)

    # ---- for the rooms' handles

    def submit(self, command: Callable[[], None]) -> None:
        """Have the transfer thread call `command`."""
        self._commands.put(command)

    def on_send(self, room: int, action: Callable[[Send], None]) -> None:
        """Have the transfer thread call `action` if it still knows the room."""
        self.submit(partial(self._apply, room, action))

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

    def bootstrap(self, destination: Destination, peer: Peer, send: Send) -> None:
        send.state.bootstrap(destination, peer.pages, peer.rows)
        if send.peer != peer.boot or send.state.error is not None:
            return send.state.fail(f"published by {destination.boot}, whose metadata names {peer.boot}")
        if peer.boot in self._broken:
            self._forget(peer.boot, f"connected anew to decode worker {peer.boot}", keep=send)
        self._transport.connect(peer)

    def finish_receive(self, room: int, row: int, quarantine: bool) -> None:
        if quarantine:
            # The thread goes on polling: without progress here the peer's writes may never reach DONE.
            self._quarantined[room] = row
        else:
            self._give_back(room, row)

    def _give_back(self, room: int, row: int) -> None:
        self.rows.give_back(row)
        self.submit(partial(self._receiving.discard, room))

    # ---- the transfer thread

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:
            log.exception("transfer_crashed boot=%s", self.boot)
            self._on_event(Crashed(error))
        finally:
            for send in self._sends.values():
                self._drop_flights(send)
            self._transport.close()

    def _loop(self) -> None:
        advanced = False
        while not self._stopping:
            self._drain(0.0 if advanced else self._poll_s())
            self._transport.progress()
            moved = [self._advance(send) for send in tuple(self._sends.values())]
            advanced = any(moved)

    def _poll_s(self) -> float | None:
        """How long to sleep on the queue; None: until a command comes."""
        if any(send.moves for send in self._sends.values()):
            return SEND_POLL_S
        return RECEIVE_POLL_S if self._receiving else None

    def _drain(self, wait_s: float | None) -> None:
        try:
            self._commands.get(block=wait_s != 0.0, timeout=wait_s)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return

    def _advance(self, send: Send) -> bool:
        """Check the room's handles, make one post, tell what follows; True when anything moved."""
        moved = [self._check(send, flight) for flight in tuple(send.flights)]
        self._drain(0.0)  # a close that waits in the queue comes before the next post
        moved.append(self._post(send))
        self._tell(send)
        return any(moved)

    def _check(self, send: Send, flight: Flight) -> bool:
        if flight not in send.flights:
            return False
        try:
            if not self._transport.check(flight.handle):
                return False
        except TransportError as error:
            self._lose(send, flight, error)
            return True
        self._land(send, flight)
        return True

    def _post(self, send: Send) -> bool:
        post = send.state.due()
        if post is None or time.monotonic() >= self._posts_until_s:
            return False
        try:
            flight = self._make(send, post)
        except TransportError as error:
            self._fail(send, error)
            return True
        if flight is None:
            return False
        send.state.posted(post)
        send.flights.append(flight)
        try:
            if self._transport.post(flight.handle):
                self._land(send, flight)
        except TransportError as error:
            self._lose(send, flight, error)
        return True

    def _make(self, send: Send, post: Post) -> Flight | None:
        """None: every source row is in flight; it comes later."""
        assert send.peer is not None
        if not isinstance(post, RowPost):
            return Flight(post, self._transport.make(send.peer, Table.POOL, post.local, post.remote), None)
        if not self._source_rows.free:
            return None
        seal = post.seal
        if self._digest:
            seal = seal._replace(digest=self.memory.digest(send.pages[: seal.pages]))
        row = self._source_rows.take()
        self._source_rows.write(row, pack(seal))
        try:
            handle = self._transport.make(
                send.peer, Table.ROWS, np.array([row], np.int32), np.array([post.row], np.int32)
            )
        except TransportError:
            self._source_rows.give_back(row)
            raise
        return Flight(post, handle, row)

    def _land(self, send: Send, flight: Flight) -> None:
        send.flights.remove(flight)
        send.state.done(flight.post, time.monotonic())
        self._let_go(flight)

    def _lose(self, send: Send, flight: Flight, error: TransportError) -> None:
        send.flights.remove(flight)
        send.lost.append(flight)
        self._fail(send, error)

    def _fail(self, send: Send, error: TransportError) -> None:
        send.state.fail(str(error))
        if isinstance(error, PeerLost) and send.peer is not None:
            self._broken.add(send.peer)

    def _let_go(self, flight: Flight) -> None:
        self._transport.release(flight.handle)
        if flight.source_row is not None:
            self._source_rows.give_back(flight.source_row)

    def _drop_flights(self, send: Send) -> None:
        for flight in send.flights + send.lost:
            self._let_go(flight)
        send.flights.clear()
        send.lost.clear()

    def _tell(self, send: Send) -> None:
        while (told := send.state.event(self._block_bytes)) is not None:
            self._on_event(told)
        if send.over:
            self._sends.pop(send.state.room, None)

    # ---- commands, on the transfer thread

    def _open(self, room: int, pages: tuple[int, ...]) -> None:
        assert room not in self._sends, f"room {room} is open already"
        geometry = self.memory.geometry
        state = RoomState(room, pages, geometry.layers, geometry.pages, self._post_blocks)
        self._sends[room] = Send(state, pages)

    def _apply(self, room: int, action: Callable[[Send], None]) -> None:
        send = self._sends.get(room)
        if send is None:
            return
        try:
            action(send)
        except TransportError as error:
            self._fail(send, error)
        self._tell(send)

    def _forget(self, boot: str, error: str, keep: Send | None = None) -> None:
        """Drop the connection to a peer; its rooms (but `keep`) fail, and what they have in flight stays
        unproven."""
        self._broken.discard(boot)
        for send in [send for send in self._sends.values() if send.peer == boot and send is not keep]:
            send.state.fail(error)
            send.peer_gone = True
            self._drop_flights(send)
            self._tell(send)
        self._transport.forget(boot)

    def _set_stopping(self) -> None:
        self._stopping = True


class RoomSender(KVSender):
    def __init__(self, manager: TransferManager, room: int, key: str) -> None:
        self._manager = manager
        self._room = room
        self._key = key

    def bootstrap(self, destination: Destination, peer_metadata: bytes, peer: Geometry) -> None:
        found = self._manager.peer_of(peer_metadata, peer)
        self._manager.on_send(self._room, partial(self._manager.bootstrap, destination, found))

    def computed(self, part: Computed) -> None:
        assert part.key == self._key, f"{part} is not of leg {self._key}"
        self._manager.on_send(self._room, lambda send: send.state.computed(part))

    def seal(self, seal: Seal) -> None:
        assert seal.room == self._room, f"{seal} is not of room {self._room}"
        now = time.monotonic()
        self._manager.on_send(self._room, lambda send: send.state.seal(seal, now))

    def close(self) -> None:
        self._manager.on_send(self._room, lambda send: send.state.close())


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
        return seal.digest == 0 or seal.digest == self._manager.memory.digest(pages[: seal.pages])

    def release(self, quarantine: bool) -> None:
        if not self._released:
            self._released = True
            self._manager.finish_receive(self._room, self._row, quarantine)
