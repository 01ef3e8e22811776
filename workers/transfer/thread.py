"""The transfer thread: it owns every send, asks each room's state what to post, and tells what is DONE."""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from relay.log import event
from relay.stretches import Stretch
from workers.engine.messages import Crashed
from workers.transfer.base import Destination, Handshakes, SendFailed, Sent, TransferEvent
from workers.transfer.connections import Connections
from workers.transfer.memory import KVMemory
from workers.transfer.metadata import ROW_BYTES, pack
from workers.transfer.peer import Peer
from workers.transfer.room_state import Post, RoomState, RowPost
from workers.transfer.rows import Rows
from workers.transfer.send import Flight, Send
from workers.transfer.transport import PeerLost, Table, Transport, TransportError

log = logging.getLogger(__name__)

SEND_POLL_S = 0.001
RECEIVE_POLL_S = 0.004  # each look takes time from a decode step
RECEIVE_FAR_POLL_S = 0.001
GREETING_POLL_S = 0.004
WAIT_POLL_S = 0.05  # compute wants the core, and tells when there is more
STALL_S = 45.0  # after a cable was cut for ten seconds, TCP may need twenty-five
STOP_S = 5.0


class TransferThread:
    """Once started, the only one that calls the transport. Its public methods queue, on any thread."""

    def __init__(
        self, transport: Transport, memory: KVMemory, source_rows: Rows, post_bytes: int, digest: bool
    ) -> None:
        assert memory.kind == "DRAM" or not digest, "the digest reads host memory: turn it off on a GPU"
        self.posts_until_s = math.inf
        self._transport = transport
        self._memory = memory
        self._source_rows = source_rows
        self._block_bytes = memory.geometry.layer_page_bytes
        self._post_blocks = max(1, post_bytes // self._block_bytes)
        self._digest = digest
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)
        # From here on the thread's own.
        self._on_event: Callable[[TransferEvent], None] = lambda _: None
        self._sends: dict[int, Send] = {}
        self._receiving: dict[int, float] = {}  # room -> how long to sleep between two looks
        self._connections = Connections(transport)
        self._stopping = False

    @property
    def handshakes(self) -> Handshakes:
        return self._connections.handshakes

    def start(self, on_event: Callable[[TransferEvent], None]) -> None:
        self._on_event = on_event
        self._thread.start()

    def open(self, room: int, pages: tuple[int, ...]) -> None:
        self._commands.put(partial(self._open, room, pages))

    def bootstrap(self, room: int, destination: Destination, peer: Peer) -> None:
        self.act(room, partial(self._bootstrap, destination, peer))

    def act(self, room: int, action: Callable[[Send], None]) -> None:
        """Do `action` to the room, if it is still known then."""
        self._commands.put(partial(self._act, room, action))

    def receiving(self, room: int, far: bool) -> None:
        """Poll for the sake of a peer that writes, until `received`."""
        poll_s = RECEIVE_FAR_POLL_S if far else RECEIVE_POLL_S
        self._commands.put(partial(self._receiving.__setitem__, room, poll_s))

    def received(self, room: int) -> None:
        self._commands.put(partial(self._receiving.pop, room, None))

    def greet(self, peer: Peer) -> None:
        """Connect before there is something to send, once nothing else moves."""
        self._commands.put(partial(self._connections.ask_to_greet, peer))

    def be_greeted(self) -> None:
        """A peer is about to connect, which takes a few looks of this side."""
        self._commands.put(self._connections.look_for_a_while)

    def forget(self, boot: str) -> None:
        self._commands.put(partial(self._forget, boot, f"decode worker {boot} is gone"))

    def stop(self) -> None:
        """Returns within STOP_S, even if the transport never does."""
        if not self._thread.is_alive():
            return
        self._commands.put(self._set_stopping)
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            event(log, "transfer_stuck", logging.ERROR, waited_s=STOP_S)

    # ---- the loop

    def _run(self) -> None:
        try:
            self._transport.begin()
            self._loop()
        except Exception as error:
            log.exception("transfer_crashed")
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
            advanced = any(moved) or self._greet_next()

    def _poll_s(self) -> float | None:
        """How long to sleep on the queue; None: until a command comes."""
        if any(send.moves for send in self._sends.values()):
            return SEND_POLL_S
        looks = list(self._receiving.values())
        if self._connections.greeting:
            looks.append(GREETING_POLL_S)
        if looks:
            return min(looks)
        return WAIT_POLL_S if any(send.waits for send in self._sends.values()) else None

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
        self._judge(send)
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

    def _judge(self, send: Send) -> None:
        """A connection on which nothing lands any more gives no error for many minutes."""
        if not send.flights or send.state.error is not None:
            return
        assert send.peer is not None
        last_s = max(send.flights[0].posted_s, self._connections.last_landed_s(send.peer))
        if time.monotonic() - last_s > STALL_S:
            self._fail(send, PeerLost(f"no write to decode worker {send.peer} has landed for {STALL_S:g} s"))

    def _post(self, send: Send) -> bool:
        post = send.state.due()
        began = time.monotonic()
        if post is None or began >= self.posts_until_s:
            return False
        try:
            flight = self._make(send, post)
        except TransportError as error:
            self._fail(send, error)
            return True
        if flight is None:
            return False
        send.state.posted(post, began)
        send.flights.append(flight)
        try:
            landed = self._transport.post(flight.handle)
            send.state.posting_s += time.monotonic() - began
            if landed:
                self._land(send, flight)
        except TransportError as error:
            self._lose(send, flight, error)
        return True

    def _make(self, send: Send, post: Post) -> Flight | None:
        """None: every source row is in flight; it comes later."""
        assert send.peer is not None
        if not isinstance(post, RowPost):
            handle = self._transport.make(send.peer, Table.POOL, post.local, post.remote)
            return Flight(post, handle, time.monotonic())
        if not self._source_rows.free:
            return None
        seal = post.seal
        if self._digest:
            assert send.state.destination is not None
            sent = send.pages[send.state.destination.first_page : seal.pages]
            seal = seal._replace(digest=self._memory.digest(sent))
        row = self._source_rows.take()
        self._source_rows.write(row, pack(seal))
        try:
            handle = self._transport.make(
                send.peer, Table.ROWS, np.array([row], np.int32), np.array([post.row], np.int32)
            )
        except TransportError:
            self._source_rows.give_back(row)
            raise
        return Flight(post, handle, time.monotonic(), row)

    def _land(self, send: Send, flight: Flight) -> None:
        now = time.monotonic()
        assert send.peer is not None
        self._connections.landed(send.peer, now)
        send.flights.remove(flight)
        send.state.done(flight.post, now)
        send.sends.add(self._stretch(flight, now))
        self._let_go(flight)

    def _stretch(self, flight: Flight, now: float) -> Stretch:
        post = flight.post
        if isinstance(post, RowPost):
            return Stretch(flight.posted_s, now, ROW_BYTES)
        return Stretch(flight.posted_s, now, len(post.local) * self._block_bytes, *post.layers)

    def _lose(self, send: Send, flight: Flight, error: TransportError) -> None:
        send.flights.remove(flight)
        send.lost.append(flight)
        self._fail(send, error)

    def _fail(self, send: Send, error: TransportError) -> None:
        send.state.fail(str(error))
        if isinstance(error, PeerLost) and send.peer is not None:
            self._connections.lose(send.peer)

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
            if isinstance(told, Sent | SendFailed):
                told = told._replace(sends=send.sends.all)
            self._on_event(told)
        if send.over:
            self._sends.pop(send.state.room, None)

    # ---- commands

    def _open(self, room: int, pages: tuple[int, ...]) -> None:
        assert room not in self._sends, f"room {room} is open already"
        geometry = self._memory.geometry
        state = RoomState(room, pages, geometry.layers, geometry.pages, self._post_blocks)
        self._sends[room] = Send(state, pages)

    def _bootstrap(self, destination: Destination, peer: Peer, send: Send) -> None:
        if destination.boot != peer.boot:
            return send.state.fail(f"published by {destination.boot}, whose metadata names {peer.boot}")
        send.state.bootstrap(destination, peer.pages, peer.rows)
        if send.peer is None or send.state.error is not None:
            return
        if self._connections.broken(peer.boot):
            self._forget(peer.boot, f"connected anew to decode worker {peer.boot}", keep=send)
        self._connections.make(peer)

    def _act(self, room: int, action: Callable[[Send], None]) -> None:
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
        for send in [send for send in self._sends.values() if send.peer == boot and send is not keep]:
            send.state.fail(error)
            send.peer_gone = True
            self._drop_flights(send)
            self._tell(send)
        self._connections.forget(boot)

    def _greet_next(self) -> bool:
        """A connection takes some 20 ms of this thread: one at a time, and not while writes are in flight."""
        if any(send.moves for send in self._sends.values()):
            return False
        peer = self._connections.next_to_greet()
        if peer is None:
            return False
        try:
            self._connections.greet(peer)
        except TransportError as error:
            event(log, "not_greeted", logging.WARNING, peer=peer.boot, error=error)
            self._forget(peer.boot, f"decode worker {peer.boot} could not be greeted")
        return True

    def _set_stopping(self) -> None:
        self._stopping = True
