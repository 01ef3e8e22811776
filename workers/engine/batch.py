"""The rows of one step, as tensors."""

from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.base import AttentionBatch
from workers.engine.sequence import Sequence


class Row(NamedTuple):
    """The next `query_tokens` tokens of a sequence, which has pages for them."""

    sequence: Sequence
    query_tokens: int

    @property
    def context_tokens(self) -> int:
        return self.sequence.computed_tokens + self.query_tokens

    @property
    def samples(self) -> bool:
        """Whether this row computes the last token, whose logits choose the next."""
        return self.context_tokens == self.sequence.tokens


class Batch(NamedTuple):
    """Row i's tokens are side by side, in the order of `rows`.

    tokens, positions: int64 [T]; logit_rows: int64 [R], one for each row that samples.
    """

    tokens: Tensor
    positions: Tensor
    logit_rows: Tensor
    attention: AttentionBatch

    @classmethod
    def build(cls, rows: Rows[Row], page_size: int, device: torch.device) -> "Batch":
        tokens: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []
        for row in rows:
            start, stop = row.sequence.computed_tokens, row.context_tokens
            tokens += row.sequence.token_ids(start, stop)
            positions += range(start, stop)
            if row.samples:
                logit_rows.append(len(tokens) - 1)
        attention = AttentionBatch(
            query_lens_tokens=[row.query_tokens for row in rows],
            context_lens_tokens=[row.context_tokens for row in rows],
            block_tables=[row.sequence.pages for row in rows],
            page_size=page_size,
        )

        def tensor(ids: list[int]) -> Tensor:
            on_gpu = device.type == "cuda"
            return torch.tensor(ids, dtype=torch.int64, pin_memory=on_gpu).to(device, non_blocking=on_gpu)

        return cls(tensor(tokens), tensor(positions), tensor(logit_rows), attention)
