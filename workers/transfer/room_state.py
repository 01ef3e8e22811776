"""One room's send, as a state machine without I/O: what may be posted now, and what is to be told.

Every block computed → every block's handle DONE → the row posted → the row DONE → `Sent`. Nothing is posted
once the room is closed or failed. An errored handle stays in flight for ever: it may still write.
Pages that the peer has are computed like all others, but no block of them is posted.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from workers.engine.messages import Computed
from workers.transfer.base import Destination, Seal, SendFailed, Sent, Settled, TransferEvent
from workers.transfer.runs import IndexArray, blocks, by_target, descriptors


class PagePost(NamedTuple):
    """A write of `local` blocks of this pool to `remote` blocks of the peer's, int32 [n], of these layers."""

    local: IndexArray
    remote: IndexArray
    layers: tuple[int, int]  # [first, last)

    def of(self, some: slice) -> "PagePost":
        return PagePost(self.local[some], self.remote[some], self.layers)


class RowPost(NamedTuple):
    """The write that seals the room."""

    seal: Seal
    row: int


Post = PagePost | RowPost


class RoomState:
    def __init__(
        self, room: int, pages: Sequence[int], layers: int, pool_pages: int, post_blocks: int
    ) -> None:
        """`pages`: source pages by position, of a pool of `layers` x `pool_pages` blocks. A post has at most
        `post_blocks` blocks."""
        self.room = room
        self.destination: Destination | None = None
        self.closed = False
        self.error: str | None = None
        self.in_flight = 0
        self.blocks_done = 0
        self.descriptors = 0
        self.posting_s = 0.0
        self._pages = tuple(pages)
        self._pool_pages = pool_pages
        self._peer_pages = 0
        self._post_blocks = post_blocks
        self._computed = np.zeros((layers, len(self._pages)), np.bool_)
        self._parts: deque[Computed] = deque()  # computed, not yet turned into indices
        self._rest: PagePost | None = None  # of the part that is being posted
        self._flying_since = 0.0
        self._flying_s = 0.0
        self._seal: Seal | None = None
        self._seal_at = 0.0
        self._row_posted = False
        self._row_done_at: float | None = None
        self._told: set[type[TransferEvent]] = set()

    # ---- what happens

    def bootstrap(self, destination: Destination, peer_pages: int, peer_rows: int) -> None:
        """The peer's pages are known. The same again (mail may come twice) changes nothing."""
        if not self._open or destination == self.destination:
            return
        if self.destination is not None:
            return self.fail("two destinations were published for one room")
        pages = np.asarray(destination.pages, np.int64)
        if len(np.unique(pages)) != len(pages) or (pages < 0).any() or (pages >= peer_pages).any():
            return self.fail(f"published pages repeat or lie outside of a pool of {peer_pages} pages")
        first, last = destination.first_page, destination.first_page + len(pages)
        if not 0 <= first <= len(self._pages) <= last:
            return self.fail(f"pages {first} to {last} were published of {len(self._pages)}")
        if not 0 <= destination.row < peer_rows:
            return self.fail(f"published metadata row {destination.row} is not one of {peer_rows}")
        self.destination = destination
        self._peer_pages = peer_pages

    def computed(self, part: Computed) -> None:
        """These blocks may be read once the part is ready. In any order, each block once; parts that wait for
        the device go out in the order told, which is the order it computes them in."""
        if not self._open:
            return
        layers, pages = self._computed.shape
        in_layers = 0 <= part.first_layer < part.last_layer <= layers
        if not in_layers or not 0 <= part.first_page <= part.last_page <= pages:
            return self.fail(f"{part} lies outside of {layers} layers and {pages} pages")
        blocks_of_part = self._computed[part.first_layer : part.last_layer, part.first_page : part.last_page]
        if blocks_of_part.any():
            # Handles have no order among each other, so an older copy could land last.
            return self.fail(f"{part} was computed before")
        blocks_of_part[...] = True
        if blocks_of_part.size:
            self._parts.append(part)

    def seal(self, seal: Seal, now: float) -> None:
        """Compute is over at `now` (monotonic seconds)."""
        if not self._open or self._seal is not None:
            return
        if not 0 < seal.pages <= len(self._pages):
            return self.fail(f"the seal names {seal.pages} pages of {len(self._pages)}")
        self._seal, self._seal_at = seal, now

    def close(self) -> None:
        """No further post."""
        self.closed = True

    def fail(self, error: str) -> None:
        """No further post; the first error is the one that is told. After the row is DONE nothing can
        fail."""
        if self.error is None and not self.complete:
            self.error = error

    def posted(self, post: Post, now: float) -> None:
        """`post`, which was due, is about to start; what it needs was made since `now`, monotonic seconds."""
        assert self._open
        if not self.in_flight:
            self._flying_since = now
        self.in_flight += 1
        if isinstance(post, RowPost):
            self._row_posted = True
            return
        assert self._rest is not None
        self.descriptors += descriptors(post.local, post.remote)
        rest = self._rest.of(slice(len(post.local), None))
        self._rest = rest if len(rest.local) else None

    def done(self, post: Post, now: float) -> None:
        """Every byte of `post` has landed."""
        assert self.in_flight > 0
        self.in_flight -= 1
        if isinstance(post, RowPost):
            self._row_done_at = now
            return
        self.blocks_done += len(post.local)
        if not self.in_flight:
            self._flying_s += now - self._flying_since

    # ---- what follows

    @property
    def complete(self) -> bool:
        """The row is DONE, and with it everything before it."""
        return self._row_done_at is not None

    @property
    def finished(self) -> bool:
        """Settled has been told: nothing more will come."""
        return Settled in self._told

    def due(self) -> Post | None:
        """The next post, or None when nothing may be posted now. Asking changes nothing that can be seen."""
        if not self._open or self.destination is None:
            return None
        self._rest = self._rest or self._next_part(self.destination)
        if self._rest is not None:
            return self._rest.of(slice(self._post_blocks))
        return self._row_due(self.destination)

    @property
    def pending(self) -> bool:
        """Something may be posted now, or once the device is done with it."""
        if not self._open or self.destination is None:
            return False
        return bool(self._rest or self._parts) or self._row_due(self.destination) is not None

    def event(self, block_bytes: int) -> TransferEvent | None:
        """The next thing to tell, each kind at most once; ask until it is None."""
        event = self._next_event(block_bytes)
        if event is not None:
            self._told.add(type(event))
        return event

    @property
    def _open(self) -> bool:
        return not self.closed and self.error is None

    def _next_part(self, destination: Destination) -> PagePost | None:
        there = destination.first_page  # pages that the peer has
        while self._parts and self._parts[0].last_page <= there:
            self._parts.popleft()
        if not self._parts or not _is_ready(self._parts[0]):
            return None
        part = self._parts.popleft()
        first, last = max(part.first_page, there), part.last_page
        source, target = by_target(self._pages[first:last], destination.pages[first - there : last - there])
        layers = (part.first_layer, part.last_layer)
        return PagePost(
            blocks(source, *layers, self._pool_pages), blocks(target, *layers, self._peer_pages), layers
        )

    def _row_due(self, destination: Destination) -> RowPost | None:
        if self._seal is None or self._row_posted or self.in_flight or self.error is not None:
            return None
        if self._parts:  # computed, but the device is not done with them
            return None
        pages = self._seal.pages
        if not self._computed[:, :pages].all():
            return None
        to_send = self._computed[:, destination.first_page :].sum()
        assert self.blocks_done == to_send, "a row may only follow DONE pages"
        return RowPost(self._seal, destination.row)

    def _next_event(self, block_bytes: int) -> TransferEvent | None:
        if self.error is not None and SendFailed not in self._told:
            return SendFailed(self.room, self.error)
        if self._row_done_at is not None and not self.closed and Sent not in self._told:
            assert self.destination is not None
            return Sent(
                self.room,
                self.blocks_done * block_bytes,
                self.descriptors,
                exposed_us=round((self._row_done_at - self._seal_at) * 1e6),
                flying_us=round(self._flying_s * 1e6),
                posting_us=round(self.posting_s * 1e6),
                spared_bytes=self.destination.first_page * len(self._computed) * block_bytes,
            )
        if self.closed and self.in_flight == 0 and Settled not in self._told:
            return Settled(self.room)
        return None


def _is_ready(part: Computed) -> bool:
    return part.ready is None or part.ready()
