"""The results of a batch on their way into its files."""

import secrets
import threading
from collections.abc import Iterator

from app.api.files import BATCH_OUTPUT
from app.batch.batch_result import Result
from app.gateway.service import Service
from relay.batches import Batch, BatchStatus, Kind
from relay.files import File, new_file_id

SPILL_BYTES = 4 << 20  # results beyond these leave Redis for the storage
SWEEP_AFTER_MS = 60_000  # Redis may lose its last second, and with it that the batch has ended


class Spool:
    """Results are kept in Redis as they come; many of them become a part in the storage, all of them a file.

    Each step ends with one call in Redis that says it is done, and before that nothing has happened: so it
    may be cut off anywhere. Methods raise RedisError, and ApiError when the storage is away.
    """

    def __init__(self, service: Service, batch_id: str, nonce: str) -> None:
        self._storage = service.storage
        self._files = service.files
        self._batches = service.batches
        self._batch_id = batch_id
        self._nonce = nonce
        self._folder = parts_folder(batch_id)
        self._spilling = {kind: threading.Lock() for kind in Kind}

    def keep(self, number: int, result: Result) -> bool:
        """Keep the result of a line, unless it has one. False: the batch is another processor's."""
        held_bytes = self._batches.write(
            self._batch_id, self._nonce, number, result.kind, result.text, result.tokens
        )
        lock = self._spilling[result.kind]
        if held_bytes is not None and held_bytes >= SPILL_BYTES and lock.acquire(blocking=False):
            try:
                self._spill(result.kind)
            finally:
                lock.release()
        return held_bytes is not None

    def close(self, ending: BatchStatus) -> bool:
        """Make the files and end the batch. False: it is another processor's."""
        batch = self._batches.finalize(self._batch_id, self._nonce, ending, new_file_id(), new_file_id())
        if batch is None:
            return False
        for kind, file_id in ((Kind.OUTPUT, batch.output_file_id), (Kind.ERRORS, batch.error_file_id)):
            if file_id and self._files.find(file_id) is None:
                self._make_file(batch, kind, file_id)
        return self._batches.finish(self._batch_id, self._nonce)

    def _spill(self, kind: Kind) -> None:
        results = self._batches.pending(self._batch_id, kind)
        part = f"{self._folder}{kind}-{secrets.token_hex(8)}"  # a name of its own: two processors may write
        self._storage.write(part, [_lines(results)])
        self._batches.spill(self._batch_id, self._nonce, kind, part, len(results))

    def _make_file(self, batch: Batch, kind: Kind, file_id: str) -> None:
        expires_s = batch.output_expires_s
        size_bytes = 0

        def counted() -> Iterator[bytes]:
            nonlocal size_bytes
            for piece in self._content(kind):
                size_bytes += len(piece)
                yield piece

        name = f"{batch.batch_id}_{kind}.jsonl"
        file = File.new(file_id, batch.owner, name, BATCH_OUTPUT, 0, expires_s)
        self._storage.write(file.stored_as, counted())
        self._files.add(File.new(file_id, batch.owner, name, BATCH_OUTPUT, size_bytes, expires_s))

    def _content(self, kind: Kind) -> Iterator[bytes]:
        for part in self._batches.parts(self._batch_id, kind):
            yield from self._storage.read(part)
        yield _lines(self._batches.pending(self._batch_id, kind))


def parts_folder(batch_id: str) -> str:
    return f"batches/{batch_id}/"


def sweep_parts(service: Service, age_ms: int = SWEEP_AFTER_MS) -> None:
    """Delete the parts of batches that have ended. Raises RedisError and ApiError."""
    for batch_id in service.batches.unswept(age_ms):
        service.storage.delete(*service.storage.names(parts_folder(batch_id)))
        service.batches.swept(batch_id)


def _lines(results: list[bytes]) -> bytes:
    return b"".join(result + b"\n" for result in results)
