"""Requests that run on a model step by step, without an engine."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import AttentionBatch
from tests.models import VOCAB_SIZE
from workers.models import Model

PAGE_SIZE = 4
LENGTH = 45


class Session:
    """Requests that run on a model through a shuffled, NaN-filled pool."""

    def __init__(self, model: Model, requests: int = 1, length: int = 64, page_size: int = PAGE_SIZE) -> None:
        self.model = model
        self.page_size = page_size
        pages_each = -(-length // page_size)
        shape = model.config.kv_shape(requests * pages_each, page_size)
        self.kv = torch.full(shape, float("nan"), dtype=model.dtype)
        order = torch.randperm(shape[1], generator=torch.Generator().manual_seed(1))
        self.tables = order.view(requests, pages_each).tolist()
        self.done_tokens = [0] * requests
        self.finished_layers: list[int] = []

    def step(self, chunks: Sequence[tuple[int, Sequence[int]]]) -> list[Tensor]:
        """Run (request, tokens) chunks in one step; logits of every token, per chunk."""
        starts = [self.done_tokens[request] for request, _ in chunks]
        for request, tokens in chunks:
            self.done_tokens[request] += len(tokens)
        batch = AttentionBatch(
            [len(tokens) for _, tokens in chunks],
            [self.done_tokens[request] for request, _ in chunks],
            [self.tables[request] for request, _ in chunks],
            self.page_size,
        )
        positions = torch.cat(
            [
                torch.arange(start, start + len(tokens))
                for start, (_, tokens) in zip(starts, chunks, strict=True)
            ]
        )
        logits = self.model.forward(
            torch.tensor([token for _, tokens in chunks for token in tokens]),
            positions,
            self.kv,
            self.model.kernels.plan(batch, self.model.device),
            self.finished_layers.append,
            torch.arange(batch.tokens),
        )
        return list(torch.split(logits, batch.query_lens_tokens))


def chunked(model: Model, tokens: list[int], chunk_lens: Sequence[int]) -> Tensor:
    """Logits of all tokens: prefill in chunks, then decode one by one."""
    session, at, logits = Session(model, length=len(tokens)), 0, []
    for length in [*chunk_lens, *[1] * (len(tokens) - sum(chunk_lens))]:
        logits += session.step([(0, tokens[at : at + length])])
        at += length
    return torch.cat(logits)


def random_tokens(length: int = LENGTH, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
