"""The token stream of a request, read from any position.

Output position p is stream entry `p+1-1`; the end after n tokens is entry `n+1-2`. So a reader that has seen
the first p tokens goes on at entry `p+1-1`, whether a token follows or the end.
"""

import json
from typing import Any, NamedTuple

from relay.redis_client import command_client
from relay.request import State, Token
from relay.rooms import root_key

READ_TOKENS = 1_000


class End(NamedTuple):
    """How a request ended. `text` is what had been held back as the possible beginning of a stop string."""

    state: State
    text: str
    finish_reason: str | None
    stop_reason: str | int | None
    error_code: str | None
    error_message: str | None


class Chunk(NamedTuple):
    tokens: list[Token]
    end: End | None


class TokenReader:
    """Any thread may read."""

    def __init__(self, url: str, model: str) -> None:
        self._commands = command_client(url)
        self._root = root_key(model)

    def read(self, request_id: str, position: int = 0, limit: int = READ_TOKENS) -> Chunk:
        """What is there from `position` on, at most `limit` entries, at once."""
        entries: Any = self._commands.xrange(
            stream_key(self._root, request_id), min=f"{position + 1}-1", count=limit
        )
        return chunk_of(entries)

    def read_all(self, request_id: str, position: int = 0) -> Chunk:
        """Everything from `position` on, however much it is."""
        tokens: list[Token] = []
        while True:
            chunk = self.read(request_id, position + len(tokens))
            tokens += chunk.tokens
            if chunk.end or len(chunk.tokens) < READ_TOKENS:
                return Chunk(tokens, chunk.end)

    def close(self) -> None:
        self._commands.close()


def stream_key(root: str, request_id: str) -> str:
    return f"{root}:tok:{request_id}:0"


def chunk_of(entries: list[tuple[bytes, dict[bytes, bytes]]]) -> Chunk:
    tokens = [_token(entry, fields) for entry, fields in entries if b"token" in fields]
    end = next((end_of(fields) for _, fields in entries[-1:] if b"state" in fields), None)
    return Chunk(tokens, end)


def _token(entry: bytes, fields: dict[bytes, bytes]) -> Token:
    return Token(
        position=int(entry.split(b"-")[0]) - 1,
        token_id=int(fields[b"token"]),
        text=fields[b"text"].decode(),
        logprobs=json.loads(fields[b"logprobs"]) if b"logprobs" in fields else None,
    )


def end_of(fields: dict[bytes, bytes]) -> End:
    def text(name: bytes) -> str | None:
        return fields[name].decode() if name in fields else None

    return End(
        state=State(fields[b"state"].decode()),
        text=text(b"text") or "",
        finish_reason=text(b"finish_reason"),
        stop_reason=json.loads(fields[b"stop_reason"]) if b"stop_reason" in fields else None,
        error_code=text(b"error_code"),
        error_message=text(b"error_message"),
    )
