"""The pages of a batch as flat arrays, as FlashInfer reads them."""

from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.base import AttentionBatch


class PageTables(NamedTuple):
    """All int32. R requests, their T new tokens and the P pages of their contexts, one after the other."""

    query_starts: Tensor  # [R + 1]: the first new token of each request, and T
    page_starts: Tensor  # [R + 1]: the first of its `pages`, and P
    last_page_tokens: Tensor  # [R]: how many slots of its last page are taken
    pages: Tensor  # [P]: only those that the context fills
    token_requests: Tensor  # [T]
    token_positions: Tensor  # [T]: in the context of its request

    @classmethod
    def of(cls, batch: AttentionBatch, pinned: bool = False) -> "PageTables":
        """On the host, in one piece; `pinned`, so that nobody waits for copies of it to a GPU."""
        queries = np.asarray(batch.query_lens_tokens, np.int32)
        contexts = np.asarray(batch.context_lens_tokens, np.int32)
        counts = -(-contexts // batch.page_size)
        query_starts, page_starts = _starts(queries), _starts(counts)
        # A token's position is its place among all new tokens, shifted by what is the same for its request.
        shifts = contexts - queries - query_starts[:-1]
        filled = (table[:count] for table, count in zip(batch.block_tables, counts.tolist()))
        arrays = (
            query_starts,
            page_starts,
            contexts - (counts - 1) * batch.page_size,
            np.fromiter(chain.from_iterable(filled), np.int32, page_starts[-1]),
            np.repeat(np.arange(len(queries), dtype=np.int32), queries),
            np.arange(query_starts[-1], dtype=np.int32) + np.repeat(shifts, queries),
        )
        packed = torch.from_numpy(np.concatenate(arrays))
        return cls._split(packed.pin_memory() if pinned else packed, [len(array) for array in arrays])

    def to(self, device: torch.device) -> "PageTables":
        """What `of` made, there, in one copy."""
        lens = [len(table) for table in self]
        packed = self.query_starts.as_strided((sum(lens),), (1,))
        return self._split(packed.to(device, non_blocking=True), lens)

    @classmethod
    def _split(cls, packed: Tensor, lens: list[int]) -> "PageTables":
        return cls(*packed.split(lens))


def _starts(lens: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], lens.cumsum())).astype(np.int32)
