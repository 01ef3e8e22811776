"""Many streams and polls, one reader on Redis.

One thread waits on the token streams of all requests that somebody follows, and hands what comes to their
watches. Emitted tokens are law: when Redis was away it may have lost its last second, so every watch is then
read again from its start and compared with what it has already handed on.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import NamedTuple

from redis.exceptions import RedisError

from relay.log import event
from relay.request import Token
from relay.token_feed import TokenFeed
from relay.tokens import Chunk, End

log = logging.getLogger(__name__)

BLOCK_MS = 200
_RETRY_S = 0.2


class StreamDiverged(Exception):
    """Redis lost tokens that were already handed on, and others took their place."""


class RedisBack(NamedTuple):
    """Redis was away. It may have forgotten the request, so look whether its record is still there."""


class ClientLeft(NamedTuple):
    """Nobody waits any more."""


Item = list[Token] | End | RedisBack | ClientLeft


class Inbox:
    """What one waiter gets: of each stream, by its number, tokens and at last the end. Any thread may put."""

    def __init__(self) -> None:
        self._items: SimpleQueue[tuple[int, Item | StreamDiverged]] = SimpleQueue()

    def put(self, number: int, item: Item | StreamDiverged) -> None:
        self._items.put((number, item))

    def leave(self) -> None:
        """The client of this waiter has gone."""
        self.put(0, ClientLeft())

    def take(self, timeout_s: float) -> tuple[int, Item] | None:
        """None after `timeout_s`. Raises StreamDiverged."""
        try:
            number, item = self._items.get(timeout=timeout_s) if timeout_s > 0 else self._items.get_nowait()
        except Empty:
            return None
        if isinstance(item, StreamDiverged):
            raise item
        return number, item


class Watch:
    """One token stream from position `start` on, for one waiter. The waiter takes, the reader feeds."""

    def __init__(
        self, follower: "Follower", request_id: str, start: int, inbox: Inbox | None = None, number: int = 0
    ) -> None:
        """`inbox` is shared with other watches of the same waiter, which knows this one as `number`."""
        self.request_id = request_id
        self.start = start
        self.next_position = start
        self.inbox = inbox or Inbox()
        self._number = number
        self._follower = follower
        self._handed_on: list[int] = []  # token ids from `start` on
        self.ended = False

    def take(self, timeout_s: float) -> Item | None:
        """The next tokens, or the end, or None after `timeout_s`. Raises StreamDiverged."""
        found = self.inbox.take(timeout_s)
        return None if found is None else found[1]

    def feed(self, chunk: Chunk, position: int) -> None:
        """Take over what was read from `position` on."""
        if position > self.next_position:
            return  # read for another watch of this stream, before this one came
        fresh = []
        for token in chunk.tokens:
            index = token.position - self.start
            if index < 0:
                continue
            if index > len(self._handed_on):
                return self._diverge(token.position)
            if index == len(self._handed_on):
                self._handed_on.append(token.token_id)
                fresh.append(token)
            elif self._handed_on[index] != token.token_id:
                return self._diverge(token.position)
            self.next_position = token.position + 1
        if fresh:
            self._put(fresh)
        if not chunk.end:
            return
        length = chunk.tokens[-1].position + 1 if chunk.tokens else position
        if length != self.start + len(self._handed_on):
            return self._diverge(length)
        self.ended = True
        self._put(chunk.end)

    def read_again(self) -> None:
        """Redis is back: compare from the start, and let the waiter look at the record."""
        self.next_position = self.start
        self._put(RedisBack())

    def close(self) -> None:
        self._follower.leave(self)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _diverge(self, position: int) -> None:
        self.ended = True
        event(log, "stream_diverged", logging.WARNING, request=self.request_id, position=position)
        self._put(StreamDiverged(f"Redis lost tokens that were already sent, position {position} on."))

    def _put(self, item: Item | StreamDiverged) -> None:
        self.inbox.put(self._number, item)


class Watches:
    """Several token streams from their beginnings, for one waiter."""

    def __init__(self, follower: "Follower", request_ids: Sequence[str]) -> None:
        self.request_ids = request_ids
        self._follower = follower
        self.inbox = Inbox()
        self.each = [
            Watch(follower, request_id, 0, self.inbox, number)
            for number, request_id in enumerate(request_ids)
        ]

    def close(self) -> None:
        for watch in self.each:
            self._follower.leave(watch)


class Follower:
    """Owns the reader thread. Any thread may `follow`."""

    def __init__(self, reader: TokenFeed) -> None:
        self._reader = reader
        self._watches: defaultdict[str, set[Watch]] = defaultdict(set)
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._thread.start()

    def follow(self, request_id: str, start: int) -> Watch:
        """Watch a token stream from position `start` on. Close the watch when done."""
        watch = Watch(self, request_id, start)
        self._add([watch])
        return watch

    def follow_all(self, request_ids: Sequence[str]) -> Watches:
        """Watch several token streams at once. Close the watches when done."""
        watches = Watches(self, request_ids)
        self._add(watches.each)
        return watches

    def _add(self, watches: Sequence[Watch]) -> None:
        with self._changed:
            for watch in watches:
                self._watches[watch.request_id].add(watch)
            self._changed.notify()
        with suppress(RedisError):  # the reader meets the same error, and tries again
            self._reader.wake()

    def leave(self, watch: Watch) -> None:
        with self._changed:
            watches = self._watches.get(watch.request_id)
            if not watches:
                return
            watches.discard(watch)
            if not watches:
                del self._watches[watch.request_id]

    def waiting(self) -> int:
        """How many wait: each for one stream or several."""
        with self._changed:
            return len({watch.inbox for watches in self._watches.values() for watch in watches})

    def alive(self) -> bool:
        """False when the reader thread met a bug: then no stream moves any more."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End the thread, within one blocking read."""
        self._stopping.set()
        with self._changed:
            self._changed.notify()
        self._thread.join()
        self._reader.close()

    def _run(self) -> None:
        away = False
        while not self._stopping.is_set():
            positions = self._positions()
            if not positions:
                continue
            try:
                chunks = self._reader.wait(positions, BLOCK_MS)
            except RedisError as error:
                if not away:
                    event(log, "redis_away", logging.WARNING, error=error, waiting=self.waiting())
                away = True
                self._stopping.wait(_RETRY_S)
                continue
            if away:
                away = False
                event(log, "redis_back", waiting=self.waiting())
                for watch in self._all():
                    watch.read_again()
                continue
            for request_id, chunk in chunks.items():
                for watch in self._of(request_id):
                    watch.feed(chunk, positions[request_id])
                    if watch.ended:
                        self.leave(watch)

    def _positions(self) -> dict[str, int]:
        """Where each stream is read from: what its slowest watch needs. Waits for a first watch."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._watches) or self._stopping.is_set())
            return {
                request_id: min(watch.next_position for watch in watches)
                for request_id, watches in self._watches.items()
            }

    def _of(self, request_id: str) -> list[Watch]:
        with self._changed:
            return list(self._watches.get(request_id, ()))

    def _all(self) -> list[Watch]:
        with self._changed:
            return [watch for watches in self._watches.values() for watch in watches]
