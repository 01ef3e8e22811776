"""Tokens of many requests as they are emitted: pushed by the server, so that nobody asks for each of them.

A push may get lost with its connection. So what a push does not tell is read: what was emitted before a
request is followed, what lies in a gap, and after a second of silence whatever may be there.
"""

import json
import logging
import secrets
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from redis.exceptions import RedisError, TimeoutError

from relay.log import event
from relay.redis_client import MAX_BLOCK_MS, command_client, push_client
from relay.request import Token
from relay.rooms import root_key
from relay.tokens import READ_TOKENS, Chunk, chunk_of, end_of, stream_key

log = logging.getLogger(__name__)

_SILENCE_S = 1.0
_CONFIRM_S = 2.0
_UNKNOWN = -1  # no position: what is there has to be read


class TokenFeed:
    """Any thread may `wake`; one thread may `wait`."""

    def __init__(self, url: str, model: str) -> None:
        self._commands = command_client(url)
        self._root = root_key(model)
        self._bell = f"{self._root}:wake:{secrets.token_hex(8)}"
        self._pushes: Any = push_client(url)
        self._next: dict[str, int] = {}  # of each request that is followed: the next token to hand on
        self._ids: dict[bytes, str] = {}  # by channel
        self._kept: deque[dict[str, Any]] = deque()  # messages that came while something else was awaited
        self._heard = 0.0  # monotonic seconds

    def wait(self, positions: Mapping[str, int], block_ms: int = MAX_BLOCK_MS) -> dict[str, Chunk]:
        """What is there for each request from its position on; waits up to `block_ms` for the first of it.

        Raises redis-py's ConnectionError or TimeoutError when the server is away.
        """
        assert positions
        assert 0 < block_ms <= MAX_BLOCK_MS
        try:
            self._follow(positions)
            behind = {each: at for each, at in positions.items() if self._next[each] != at}
            return self._read(behind) or self._pushed(block_ms) or self._missed(positions)
        except RedisError:
            self._reset()
            raise

    def wake(self) -> bool:
        """End the current or the next `wait`, so that it takes up another request. False before the first."""
        return bool(self._commands.publish(self._bell, b""))

    def close(self) -> None:
        self._reset()
        self._commands.close()

    # What is followed

    def _follow(self, positions: Mapping[str, int]) -> None:
        if gone := self._next.keys() - positions.keys():
            self._pushes.unsubscribe(*self._forget(gone))
        new = {stream_key(self._root, each).encode(): each for each in positions.keys() - self._next.keys()}
        if not new:
            return
        bell = [] if self._ids else [self._bell]
        self._ids |= new
        self._pushes.subscribe(*bell, *new)
        # Only what is read after the server has confirmed reaches to where the pushes begin.
        waiting = len(new) + len(bell)
        while waiting:
            message = self._pushes.get_message(timeout=_CONFIRM_S)
            if message is None:
                raise TimeoutError("no answer to SUBSCRIBE")
            if message["type"] == "subscribe":
                waiting -= 1
            elif message["type"] == "message":
                self._kept.append(message)
        self._next |= dict.fromkeys(new.values(), _UNKNOWN)

    def _forget(self, request_ids: Iterable[str]) -> list[bytes]:
        channels = [stream_key(self._root, each).encode() for each in request_ids]
        for channel in channels:
            del self._next[self._ids.pop(channel)]
        return channels

    def _reset(self) -> None:
        self._pushes.reset()
        self._next.clear()
        self._ids.clear()
        self._kept.clear()

    # What is there

    def _read(self, positions: Mapping[str, int]) -> dict[str, Chunk]:
        if not positions:
            return {}
        after: Any = {stream_key(self._root, each): f"{at + 1}-0" for each, at in positions.items()}
        reply: Any = self._commands.xread(after, count=READ_TOKENS)
        entries = {self._ids[stream]: found for stream, found in reply or []}
        chunks = {each: chunk_of(found) for each, found in entries.items()}
        for each, at in positions.items():
            more = len(entries.get(each, ())) == READ_TOKENS
            self._next[each] = _UNKNOWN if more else at + len(chunks[each].tokens if each in chunks else ())
        self._heard = time.monotonic()
        return chunks

    def _missed(self, positions: Mapping[str, int]) -> dict[str, Chunk]:
        if time.monotonic() - self._heard < _SILENCE_S:
            return {}
        if chunks := self._read(positions):
            event(log, "push_missed", logging.WARNING, requests=len(chunks))
            self._reset()
        return chunks

    def _pushed(self, block_ms: int) -> dict[str, Chunk]:
        chunks: dict[str, Chunk] = {}
        timeout_s = block_ms / 1000
        while (message := self._message(timeout_s)) is not None:
            timeout_s = 0.0
            if message["type"] != "message" or (each := self._ids.get(message["channel"])) is None:
                continue
            self._heard = time.monotonic()
            at = self._next[each]
            if at == _UNKNOWN:
                continue
            told = json.loads(message["data"])
            if told["start"] > at:
                self._next[each] = _UNKNOWN
                continue
            chunk = _pushed_chunk(told, at)
            self._next[each] = at + len(chunk.tokens)
            before = chunks.get(each, Chunk([], None))
            chunks[each] = Chunk(before.tokens + chunk.tokens, chunk.end)
        return chunks

    def _message(self, timeout_s: float) -> dict[str, Any] | None:
        if self._kept:
            return self._kept.popleft()
        found: dict[str, Any] | None = self._pushes.get_message(timeout=timeout_s)
        return found


def _pushed_chunk(told: dict[str, Any], position: int) -> Chunk:
    """What `emit` was told, or the end as `end_request` tells it, without the tokens before `position`."""
    if "ending" in told:
        words = [str(word).encode() for word in told["ending"]]
        return Chunk([], end_of(dict(zip(words[::2], words[1::2], strict=True))))
    start = told["start"]
    tokens = [
        Token(at, token_id, text, json.loads(logprobs[0]) if logprobs else None)
        for at, (token_id, text, *logprobs) in enumerate(told["tokens"], start)
        if at >= position
    ]
    return Chunk(tokens, None)
