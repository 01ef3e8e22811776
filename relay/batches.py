"""Batches of requests in Redis: one method per event of `batches.lua`.

Every method may run twice without harm. All raise redis.exceptions.ConnectionError or TimeoutError when the
server is away. `nonce` names the processor that works on a batch, `line` counts from 0.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from redis import Redis

from relay.functions import Functions
from relay.protocol import Protocol


class BatchStatus(StrEnum):
    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in (self.COMPLETED, self.FAILED, self.EXPIRED, self.CANCELLED)


class Kind(StrEnum):
    """The two files that results go to."""

    OUTPUT = "output"
    ERRORS = "errors"


class BatchError(NamedTuple):
    """What is wrong with an input file. `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Tokens(NamedTuple):
    """Tokens of a line's request; those that were cached are among the input."""

    input: int = 0
    cached: int = 0
    output: int = 0


NO_TOKENS = Tokens()


@dataclass(frozen=True, slots=True)
class Order:
    """What a client asks for. `output_expires_s`: how long the result files are kept; None: until deleted."""

    batch_id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    window_s: int
    metadata: dict[str, str] | None = None
    output_expires_s: int | None = None
    idempotency_key: str | None = None
    body_hash: str = ""


@dataclass(frozen=True, slots=True)
class Batch:
    """As in Redis now. `times` has the second of each state that was entered, by its name. `total` is None
    until the input is read. `ending` is the state in which it will end, once that is sure."""

    batch_id: str
    owner: str
    status: BatchStatus
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None
    output_expires_s: int | None
    created: int
    expires: int
    times: dict[BatchStatus, int]
    total: int | None
    completed: int
    failed: int
    tokens: Tokens
    errors: tuple[BatchError, ...]
    output_file_id: str | None
    error_file_id: str | None
    ending: BatchStatus | None


class KeyConflict(Exception):
    """The idempotency key came before with another body."""


class Batches:
    """The batches of one model. Thread-safe."""

    def __init__(self, redis: Redis, root: str, protocol: Protocol) -> None:
        self._functions = Functions(redis, root, protocol, "batches.lua", "kvrelay_batches")

    # Gateway

    def create(self, order: Order) -> tuple[Batch, bool]:
        """The batch, and whether it is new: a repeated key finds the first one. Raises KeyConflict."""
        fields: dict[str, str | int] = {
            "endpoint": order.endpoint,
            "input_file_id": order.input_file_id,
            "completion_window": order.completion_window,
        }
        if order.metadata is not None:
            fields["metadata"] = json.dumps(order.metadata)
        if order.output_expires_s is not None:
            fields["output_expires_s"] = order.output_expires_s
        outcome, found = self._functions.call(
            "create",
            order.batch_id,
            order.owner,
            order.window_s,
            order.idempotency_key or "",
            order.body_hash,
            *(part for pair in fields.items() for part in pair),
        )
        if outcome == b"conflict":
            raise KeyConflict
        batch = _batch(found)
        assert batch
        return batch, outcome == b"new"

    def find(self, batch_id: str) -> Batch | None:
        return _batch(self._functions.call("find", batch_id))

    def of(self, owner: str, after: str | None, count: int) -> list[Batch] | None:
        """At most `count`, newest first, behind the one with the id `after`. None: there is no such one."""
        found = self._functions.call("list", owner, after or "", count)
        return None if found is None else [batch for batch in map(_batch, found) if batch]

    def open(self) -> list[Batch]:
        """All that have not ended."""
        return [batch for batch in map(_batch, self._functions.call("open")) if batch]

    def inputs(self) -> set[str]:
        """The input files of all batches that have not ended."""
        return {batch.input_file_id for batch in self.open()}

    def cancel(self, batch_id: str) -> Batch | None:
        """No new line is begun. A batch whose files are being made, or that has ended, stays as it is."""
        return _batch(self._functions.call("cancel", batch_id))

    # Processors

    def claim(self, nonce: str, lease_ms: int) -> Batch | None:
        """The oldest batch that nobody works on."""
        return _batch(self._functions.call("claim", nonce, lease_ms) or [])

    def renew(self, batch_id: str, nonce: str, lease_ms: int) -> tuple[BatchStatus, float] | None:
        """Status and seconds until it expires. None: the batch is not this processor's any more."""
        reply = self._functions.call("renew", batch_id, nonce, lease_ms)
        return (BatchStatus(reply[0].decode()), float(reply[1])) if reply else None

    def release(self, batch_id: str, nonce: str) -> None:
        """Another processor may go on at once."""
        self._functions.call("release", batch_id, nonce)

    def reject(self, batch_id: str, nonce: str, errors: Sequence[BatchError]) -> bool:
        """End it as failed: its input cannot be used."""
        return bool(self._functions.call("reject", batch_id, nonce, json.dumps(errors)))

    def start(self, batch_id: str, nonce: str, total: int) -> bool:
        """Its input has `total` lines and can be used."""
        return bool(self._functions.call("start", batch_id, nonce, total))

    def done(self, batch_id: str) -> bytes:
        """A bitmap of the lines whose result is written: bit 7 of byte 0 is line 0."""
        return bytes(self._functions.call("done", batch_id))

    def write(
        self, batch_id: str, nonce: str, line: int, kind: Kind, result: bytes, tokens: Tokens = NO_TOKENS
    ) -> int | None:
        """Keep the result of a line, unless there is one. The bytes of this kind that lie in Redis.

        None: the batch is not this processor's any more.
        """
        held_bytes = self._functions.call("write", batch_id, nonce, line, kind, result, *tokens)
        return None if held_bytes < 0 else int(held_bytes)

    def pending(self, batch_id: str, kind: Kind) -> list[bytes]:
        """The results that are in no part yet, oldest first."""
        return list(self._functions.call("pending", batch_id, kind))

    def parts(self, batch_id: str, kind: Kind) -> list[str]:
        """The parts of older results, in order."""
        return [name.decode() for name in self._functions.call("parts", batch_id, kind)]

    def spill(self, batch_id: str, nonce: str, kind: Kind, part: str, results: int) -> bool:
        """The oldest `results` of those pending are in `part` now."""
        return bool(self._functions.call("spill", batch_id, nonce, kind, part, results))

    def finalize(
        self, batch_id: str, nonce: str, ending: BatchStatus, output_file_id: str, error_file_id: str
    ) -> Batch | None:
        """Nothing is written any more. The first call decides how it ends and which files it gets.

        None: the batch is not this processor's any more.
        """
        assert ending.terminal
        return _batch(
            self._functions.call("finalize", batch_id, nonce, ending, output_file_id, error_file_id)
        )

    def finish(self, batch_id: str, nonce: str) -> bool:
        """Its files are there: it ends."""
        return bool(self._functions.call("finish", batch_id, nonce))

    def unswept(self, age_ms: int) -> list[str]:
        """Batches that ended at least `age_ms` ago and whose parts are still in the storage."""
        return [batch_id.decode() for batch_id in self._functions.call("unswept", age_ms)]

    def swept(self, batch_id: str) -> None:
        """The parts of this batch are deleted."""
        self._functions.call("swept", batch_id)


def _batch(flat: Sequence[bytes]) -> Batch | None:
    if not flat:
        return None
    fields = {name.decode(): value.decode() for name, value in zip(flat[::2], flat[1::2])}

    def number(name: str) -> int | None:
        return int(fields[name]) if name in fields else None

    metadata: Any = json.loads(fields.get("metadata", "null"))
    return Batch(
        batch_id=fields["id"],
        owner=fields["owner"],
        status=BatchStatus(fields["status"]),
        endpoint=fields["endpoint"],
        input_file_id=fields["input_file_id"],
        completion_window=fields["completion_window"],
        metadata=metadata,
        output_expires_s=number("output_expires_s"),
        created=int(fields["created_at"]),
        expires=int(fields["expires_at"]),
        times={each: int(fields[f"{each}_at"]) for each in BatchStatus if f"{each}_at" in fields},
        total=number("total"),
        completed=int(fields["completed"]),
        failed=int(fields["failed"]),
        tokens=Tokens(
            number("input_tokens") or 0, number("cached_tokens") or 0, number("output_tokens") or 0
        ),
        errors=tuple(BatchError(*each) for each in json.loads(fields.get("errors", "[]"))),
        output_file_id=fields.get("output_file_id"),
        error_file_id=fields.get("error_file_id"),
        ending=BatchStatus(fields["ending"]) if "ending" in fields else None,
    )
