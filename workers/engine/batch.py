"""The rows of one step, as tensors."""

from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.base import AttentionBatch
from workers.engine.sequence import Sequence


class Row(NamedTuple):
    """The tokens [start, start + query_tokens) of a sequence, which has pages for them.

    `position` is that of the output token which the last of them chooses; None: the prompt goes on.
    """

    sequence: Sequence
    start: int
    query_tokens: int
    position: int | None

    @classmethod
    def next(cls, sequence: Sequence, query_tokens: int) -> "Row":
        """The next `query_tokens` tokens that no step was launched for."""
        whole = query_tokens == sequence.pending_tokens
        return cls(sequence, sequence.launched_tokens, query_tokens, sequence.position if whole else None)

    @property
    def context_tokens(self) -> int:
        return self.start + self.query_tokens

    @property
    def samples(self) -> bool:
        return self.position is not None

    @property
    def decodes(self) -> bool:
        return self.position is not None and self.position > len(self.sequence.work.emitted)

    @property
    def scored_ids(self) -> list[int]:
        """The prompt tokens behind each of its first tokens, where those are to be scored."""
        if not self.sequence.scored:
            return []
        prompt = self.sequence.work.prompt_ids
        return list(prompt[self.start + 1 : self.context_tokens + 1])

    @property
    def unread(self) -> bool:
        """Its one token is known to nobody but the device."""
        return self.start >= self.sequence.tokens


class Drawn(NamedTuple):
    """What a step sampled that nobody has read yet: `ids` int64 [R] on its device, of these sequences."""

    sequences: list[Sequence]
    ids: Tensor


class Batch(NamedTuple):
    """Row i's tokens are side by side, in the order of `rows`.

    tokens, positions: int64 [T]; logit_rows: int64 [R], one for each row that samples, then those of the
    tokens that score the prompts' next ones. Where `drawn` is, the
    tokens at `drawn_at` int64 [U] are those of its ids at `drawn_from` int64 [U].
    """

    tokens: Tensor
    positions: Tensor
    logit_rows: Tensor
    attention: AttentionBatch
    drawn: Tensor | None
    drawn_at: Tensor
    drawn_from: Tensor

    @classmethod
    def build(
        cls, rows: Rows[Row], page_size: int, device: torch.device, drawn: Drawn | None = None
    ) -> "Batch":
        """`drawn` is of the step before, unless its tokens were read."""
        tokens: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []
        scored_rows: list[int] = []
        drawn_at: list[int] = []
        drawn_from: list[int] = []
        index = {sequence: i for i, sequence in enumerate(drawn.sequences)} if drawn is not None else {}
        for row in rows:
            if drawn is not None and row.unread:
                drawn_at.append(len(tokens))
                drawn_from.append(index[row.sequence])
                tokens.append(0)
            else:
                tokens += row.sequence.token_ids(row.start, row.context_tokens)
            positions += range(row.start, row.context_tokens)
            first = len(tokens) - row.query_tokens
            scored_rows += range(first, first + len(row.scored_ids))
            if row.samples:
                logit_rows.append(len(tokens) - 1)
        attention = AttentionBatch(
            query_lens_tokens=[row.query_tokens for row in rows],
            context_lens_tokens=[row.context_tokens for row in rows],
            block_tables=[row.sequence.pages for row in rows],
            page_size=page_size,
        )

        parts = (tokens, positions, logit_rows + scored_rows, drawn_at, drawn_from)
        on_gpu = device.type == "cuda"
        packed = torch.tensor([i for part in parts for i in part], dtype=torch.int64, pin_memory=on_gpu)
        there = packed.to(device, non_blocking=on_gpu).split([len(part) for part in parts])
        ids = drawn.ids if drawn is not None and drawn_at else None
        return cls(there[0], there[1], there[2], attention, ids, there[3], there[4])

    def input_tokens(self) -> Tensor:
        """`tokens` with those that only the device knows: int64 [T], there."""
        if self.drawn is None:
            return self.tokens
        return self.tokens.index_copy(0, self.drawn_at, self.drawn[self.drawn_from])
