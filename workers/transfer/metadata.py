"""The metadata row: written by the prefill worker after the last page, believed only when whole.

Little-endian, fixed size, plain numbers. A row is poisoned with 0xFF before it is published, so an unwritten
one has no valid version; the checksum over all that precedes it tells a torn one from a whole one.
"""

import zlib

import numpy as np

from workers.engine.messages import Sampled
from workers.transfer.base import Seal

VERSION = 1
MAX_LOGPROBS = 21  # the chosen token and the 20 most likely

ROW = np.dtype(
    [
        ("version", "<i8"),
        ("room", "<i8"),
        ("attempt", "<i8"),
        ("nonce", "<i8"),
        ("position", "<i8"),
        ("tokens", "<i8"),
        ("pages", "<i8"),
        ("cached_tokens", "<i8"),
        ("digest", "<i8"),
        ("first_id", "<i8"),
        ("logprob_count", "<i8"),  # -1: none were asked for
        ("logprob_ids", "<i4", (MAX_LOGPROBS,)),
        ("logprobs", "<f4", (MAX_LOGPROBS,)),
        ("checksum", "<u4"),
        ("padding", "<u4"),
    ]
)
ROW_BYTES = 320  # whole cache lines
POISON = b"\xff" * ROW_BYTES
_CHECKED_BYTES = ROW.fields["checksum"][1]  # type: ignore[index]
_NUMBERS = ("room", "attempt", "nonce", "position", "tokens", "pages", "cached_tokens", "digest")


def pack(seal: Seal) -> bytes:
    """The row's `ROW_BYTES` bytes."""
    row = np.zeros((), ROW)
    row["version"] = VERSION
    for name in _NUMBERS:
        row[name] = getattr(seal, name)
    row["first_id"] = seal.first.token_id
    logprobs = seal.first.logprobs
    row["logprob_count"] = -1 if logprobs is None else len(logprobs)
    assert logprobs is None or len(logprobs) <= MAX_LOGPROBS, f"more than {MAX_LOGPROBS} logprobs"
    for i, (token_id, logprob) in enumerate(logprobs or ()):
        row["logprob_ids"][i] = int(token_id)
        row["logprobs"][i] = logprob
    row["checksum"] = zlib.crc32(row.tobytes()[:_CHECKED_BYTES])
    return row.tobytes().ljust(ROW_BYTES, b"\0")


def unpack(data: bytes) -> Seal | None:
    """The seal in a row, or None while the row is poisoned, torn or of another version."""
    assert len(data) == ROW_BYTES
    row = np.frombuffer(data, ROW, count=1)[0]
    if row["version"] != VERSION or row["checksum"] != zlib.crc32(data[:_CHECKED_BYTES]):
        return None
    numbers = {name: int(row[name]) for name in _NUMBERS}
    return Seal(first=Sampled(int(row["first_id"]), _logprobs(row)), **numbers)


def _logprobs(row: np.void) -> list[list[float]] | None:
    count = int(row["logprob_count"])
    if count < 0:
        return None
    pairs = zip(row["logprob_ids"][:count].tolist(), row["logprobs"][:count].tolist(), strict=True)
    return [[token_id, logprob] for token_id, logprob in pairs]
