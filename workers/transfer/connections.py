"""To whom a process is connected, how well that goes, and whom it is still to greet."""

import time
from collections import deque

from workers.transfer.base import Handshakes
from workers.transfer.peer import Peer
from workers.transfer.transport import Transport, TransportError

GREETING_S = 3.0  # both sides see each other within one renewal


class Connections:
    """By boot. The transfer thread's own, but for `handshakes`; times are monotonic seconds."""

    def __init__(self, transport: Transport) -> None:
        self.handshakes = Handshakes()  # replaced as a whole
        self._transport = transport
        self._made: set[str] = set()
        self._broken: set[str] = set()
        self._landed_s: dict[str, float] = {}
        self._to_greet: deque[Peer] = deque()
        self._greeting_until_s = 0.0

    def make(self, peer: Peer) -> None:
        """Nothing to do where there is one. Raises TransportError."""
        if peer.boot in self._made:
            return
        ok, failed = self.handshakes
        try:
            self._transport.connect(peer)
        except TransportError:
            self.handshakes = Handshakes(ok, failed + 1)
            raise
        self.handshakes = Handshakes(ok + 1, failed)
        self._made.add(peer.boot)

    def forget(self, boot: str) -> None:
        self._made.discard(boot)
        self._broken.discard(boot)
        self._landed_s.pop(boot, None)
        self._to_greet = deque(peer for peer in self._to_greet if peer.boot != boot)
        self._transport.forget(boot)

    # ---- how well they go

    def lose(self, boot: str) -> None:
        """What goes on there may go on, but the next room is to connect anew."""
        self._broken.add(boot)

    def broken(self, boot: str) -> bool:
        return boot in self._broken

    def landed(self, boot: str, now: float) -> None:
        """A write has."""
        self._landed_s[boot] = now

    def last_landed_s(self, boot: str) -> float:
        """0: none ever did."""
        return self._landed_s.get(boot, 0.0)

    # ---- before there is something to send

    def ask_to_greet(self, peer: Peer) -> None:
        self._to_greet.append(peer)

    def next_to_greet(self) -> Peer | None:
        """Whom nobody has connected to yet."""
        while self._to_greet:
            peer = self._to_greet.popleft()
            if peer.boot not in self._made:
                return peer
        return None

    def greet(self, peer: Peer) -> None:
        """Raises TransportError; the first room tries again."""
        try:
            self.make(peer)
            self._transport.greet(peer.boot)
        finally:
            self.look_for_a_while()

    def look_for_a_while(self) -> None:
        """A peer connects, here or there, which takes a few looks of this side."""
        self._greeting_until_s = time.monotonic() + GREETING_S

    @property
    def greeting(self) -> bool:
        return time.monotonic() < self._greeting_until_s
