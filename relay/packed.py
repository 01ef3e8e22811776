"""Lists of token and page ids as Redis holds them: int32, little-endian, without any frame."""

import struct
from collections.abc import Sequence


def pack_ints(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def unpack_ints(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 4}i", packed)
