"""Where a worker's KV pool lies."""

import ctypes
import zlib
from collections.abc import Sequence
from typing import Literal, NamedTuple

from relay.geometry import Geometry

MemoryKind = Literal["DRAM", "VRAM"]


class KVMemory(NamedTuple):
    """One contiguous tensor [layers, pages, 2, page_size, kv_heads, head_dim] at `address`.

    A block is one page in one layer: index `layer * pages + page`, `geometry.layer_page_bytes` bytes.
    """

    geometry: Geometry
    address: int
    kind: MemoryKind = "DRAM"
    device: int = 0

    @property
    def blocks(self) -> int:
        return self.geometry.layers * self.geometry.pages

    @property
    def size_bytes(self) -> int:
        return self.blocks * self.geometry.layer_page_bytes

    def digest(self, pages: Sequence[int]) -> int:
        """CRC-32 over these pages, layer by layer in the order given; never 0, which means "no digest"."""
        assert self.kind == "DRAM", "the digest reads host memory"
        size = self.geometry.layer_page_bytes
        crc = 0
        for layer in range(self.geometry.layers):
            for page in pages:
                start = self.address + (layer * self.geometry.pages + page) * size
                crc = zlib.crc32((ctypes.c_char * size).from_address(start), crc)
        return 1 << 32 | crc
