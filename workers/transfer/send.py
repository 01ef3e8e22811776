"""One room's send as the transfer thread keeps it: its state, and the handles in flight."""

from dataclasses import dataclass, field

from relay.stretches import Stretches
from workers.transfer.room_state import Post, RoomState
from workers.transfer.transport import Handle


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A write that is posted at `posted_s`, monotonic. `source_row` holds the seal until it has landed."""

    post: Post
    handle: Handle
    posted_s: float
    source_row: int | None = None


@dataclass(slots=True)
class Send:
    """`pages`: source pages by position. A lost flight ended in an error: it may still write."""

    state: RoomState
    pages: tuple[int, ...]
    flights: list[Flight] = field(default_factory=list)
    lost: list[Flight] = field(default_factory=list)
    peer_gone: bool = False
    sends: Stretches = field(default_factory=Stretches)  # what has landed, in monotonic seconds

    @property
    def peer(self) -> str | None:
        return self.state.destination.boot if self.state.destination else None

    @property
    def moves(self) -> bool:
        """A write is in flight, or may start without a word: nobody tells when a device is done."""
        return bool(self.flights) or self.state.pending

    @property
    def waits(self) -> bool:
        """More will be computed for this peer. Until then only the connection may advance."""
        state = self.state
        return state.destination is not None and not (state.closed or state.error or state.complete)

    @property
    def over(self) -> bool:
        """Nothing more will be told of this room."""
        return self.state.finished or (self.state.closed and self.peer_gone)
