"""Many streams and polls, one reader on Redis.

One thread waits on the token streams of all requests that somebody follows, and hands what comes to their
watches. Emitted tokens are law: when Redis was away it may have lost its last second, so every watch is then
read again from its start and compared with what it has already handed on.
"""

import logging
import threading
from collections import defaultdict
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import NamedTuple

from redis.exceptions import RedisError

from relay.log import event
from relay.request import Token
from relay.tokens import Chunk, End, TokenReader

log = logging.getLogger(__name__)

BLOCK_MS = 200
_RETRY_S = 0.2


class StreamDiverged(Exception):
    """Redis lost tokens that were already handed on, and others took their place."""


class RedisBack(NamedTuple):
    """Redis was away. It may have forgotten the request, so look whether its record is still there."""


class Watch:
    """One waiter on one token stream, from position `start` on. The waiter takes, the reader feeds."""

    def __init__(self, follower: "Follower", request_id: str, start: int) -> None:
        self.request_id = request_id
        self.start = start
        self.next_position = start
        self._follower = follower
        self._handed_on: list[int] = []  # token ids from `start` on
        self._items: SimpleQueue[list[Token] | End | RedisBack | StreamDiverged] = SimpleQueue()
        self.ended = False

    def take(self, timeout_s: float) -> list[Token] | End | RedisBack | None:
        """The next tokens, or the end, or None after `timeout_s`. Raises StreamDiverged."""
        try:
            item = self._items.get(timeout=timeout_s) if timeout_s > 0 else self._items.get_nowait()
        except Empty:
            return None
        if isinstance(item, StreamDiverged):
            raise item
        return item

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
            self._items.put(fresh)
        if not chunk.end:
            return
        length = chunk.tokens[-1].position + 1 if chunk.tokens else position
        if length != self.start + len(self._handed_on):
            return self._diverge(length)
        self.ended = True
        self._items.put(chunk.end)

    def read_again(self) -> None:
        """Redis is back: compare from the start, and let the waiter look at the record."""
        self.next_position = self.start
        self._items.put(RedisBack())

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
        self._items.put(StreamDiverged(f"Redis lost tokens that were already sent, position {position} on."))


class Follower:
    """Owns the reader thread. Any thread may `follow`."""

    def __init__(self, reader: TokenReader) -> None:
        self._reader = reader
        self._watches: defaultdict[str, set[Watch]] = defaultdict(set)
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._thread.start()

    def follow(self, request_id: str, start: int) -> Watch:
        """Watch a token stream from position `start` on. Close the watch when done."""
        watch = Watch(self, request_id, start)
        with self._changed:
            self._watches[request_id].add(watch)
            self._changed.notify()
        with suppress(RedisError):  # the reader meets the same error, and tries again
            self._reader.wake()
        return watch

    def leave(self, watch: Watch) -> None:
        with self._changed:
            watches = self._watches.get(watch.request_id)
            if not watches:
                return
            watches.discard(watch)
            if not watches:
                del self._watches[watch.request_id]

    def watching(self) -> int:
        with self._changed:
            return sum(len(watches) for watches in self._watches.values())

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
                    event(log, "redis_away", logging.WARNING, error=error, watches=self.watching())
                away = True
                self._stopping.wait(_RETRY_S)
                continue
            if away:
                away = False
                event(log, "redis_back", watches=self.watching())
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
