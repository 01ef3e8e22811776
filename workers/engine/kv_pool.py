"""The memory of the KV pool."""

import mmap
from contextlib import suppress
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class KVPool:
    """`tensor` is [layers, pages, 2, page_size, kv_heads, head_dim], keys at index 0 and values at 1.

    It lives as long as any tensor that views it.
    """

    tensor: Tensor

    @classmethod
    def allocate(
        cls, shape: tuple[int, int, int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> "KVPool":
        """Zeroed memory; on a CPU in huge pages where the kernel grants them, for the transport's speed.
        On a GPU from cudaMalloc (`choose_device` sees to that), which other processes can map."""
        if device.type != "cpu":
            return cls(torch.zeros(shape, dtype=dtype, device=device))
        size_bytes = prod(shape) * dtype.itemsize
        # Private, because shared anonymous memory gets no huge pages by default.
        memory = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        raw = torch.frombuffer(memory, dtype=torch.uint8)
        offset = -raw.data_ptr() % HUGE_PAGE_BYTES
        tensor = raw[offset : offset + size_bytes].view(dtype).view(shape)
        # Touched now: a pool that does not fit fails at start, and no step pays for page faults.
        return cls(tensor.zero_())

    @property
    def pages(self) -> int:
        return self.tensor.shape[1]

    @property
    def page_size(self) -> int:
        return self.tensor.shape[3]

    @property
    def layer_token_bytes(self) -> int:
        """Of one token in one layer."""
        return self.tensor.nbytes // (self.tensor.shape[0] * self.pages * self.page_size)

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    @property
    def size_bytes(self) -> int:
        return self.tensor.nbytes
