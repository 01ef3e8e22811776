"""What every set of kernels offers.

Shapes follow FlashInfer's NHD layout. T is the tokens of a step, all requests one after the other.

- the KV pool of a model: `[layers, pages, 2, page_size, kv_heads, head_dim]`
- the KV of one layer: `[pages, 2, page_size, kv_heads, head_dim]`, keys at index 0, values at 1
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.decoder import Decoder, ForwardPass
from kernels.quantized_matrix import Matrix

Plan = Any  # what `plan` returns: each set of kernels has its own, callers only hand it back


class NotCompiled(ValueError):
    """A kernel would have to be compiled first, where that is not to be: what to do is said."""


class AttentionBatch(NamedTuple):
    """The requests of one step, on the host. Row i of each list is request i.

    A request's context includes its new query tokens: they are the last `query_lens_tokens[i]` of
    `context_lens_tokens[i]`. Its block table may list more pages than the context fills.
    """

    query_lens_tokens: list[int]
    context_lens_tokens: list[int]
    block_tables: Sequence[Sequence[int]]
    page_size: int

    @property
    def tokens(self) -> int:
        return sum(self.query_lens_tokens)

    @property
    def decodes_only(self) -> bool:
        return all(query == 1 for query in self.query_lens_tokens)

    def check(self) -> None:
        """Assert what kernels rely on: each request has queries, and pages for its whole context."""
        assert self.page_size > 0
        assert len(self.query_lens_tokens) == len(self.context_lens_tokens) == len(self.block_tables)
        for query, context, table in zip(
            self.query_lens_tokens, self.context_lens_tokens, self.block_tables, strict=True
        ):
            assert 0 < query <= context, f"{query} query tokens in a context of {context}"
            assert len(table) * self.page_size >= context, f"{len(table)} pages for {context} tokens"


class Kernels(Protocol):
    """One implementation of a model's operations. `plan` runs once a step, the rest once a layer.

    Floating tensors have the model's dtype unless stated. Inputs may be overwritten only where it
    says so.
    """

    name: str
    keeps_quantized: bool
    """Whether `compile` keeps quantized matrices in few bits; else they grow to the model's dtype."""

    def compile(self, decoder: Decoder) -> ForwardPass:
        """A whole pass over `decoder`, whose layers it takes: by these operations or by what is faster."""
        ...

    def warm_rows(self, max_rows: int) -> list[int]:
        """How many decodes the steps have that are best run once before any work comes, in this order; none
        will have more than `max_rows`."""
        ...

    def plan(self, batch: AttentionBatch, device: torch.device) -> Plan:
        """Prepare everything about `batch` that all layers share, also where new tokens are stored."""
        ...

    def append(self, k: Tensor, v: Tensor, layer_kv: Tensor, plan: Plan) -> None:
        """Write the step's k and v `[T, kv_heads, head_dim]` into their pages of `layer_kv`."""
        ...

    def attention(
        self,
        q: Tensor,
        layer_kv: Tensor,
        plan: Plan,
        *,
        scale: float,
        sliding_window: int | None = None,
        logit_soft_cap: float | None = None,
    ) -> Tensor:
        """Causal attention of q `[T, heads, head_dim]` over the pages; returns the same shape.

        `heads` is a multiple of `kv_heads`. With `sliding_window` a token sees that many tokens, itself
        included. With `logit_soft_cap` scores become `cap * tanh(score / cap)`. Slots beyond a context
        may hold anything, NaN too, and never reach the result. Raises NotCompiled.
        """
        ...

    def embedding(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Rows of weight `[vocab, hidden]` for tokens int64 `[T]`: `[T, hidden]`."""
        ...

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias` for x `[T, in]`, weight `[out, in]`, bias `[out]`: `[T, out]`."""
        ...

    def logits(self, x: Tensor, head: Tensor) -> Tensor:
        """`x @ head.T` for x `[R, hidden]`, head `[vocab, hidden]`: float32 `[R, vocab]`.

        The highest ones of a row are as exact as float32 sums: rounded to bfloat16, the best tokens tie.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalize the last axis of x by its root mean square, times weight; float32 inside."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return `(rms_norm(x + residual), x + residual)`; may overwrite both inputs."""
        ...

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q `[T, heads, head_dim]` and k `[T, kv_heads, head_dim]`, halves paired (NeoX style).

        `positions` is int64 `[T]`; `cos_sin_cache` is float32 `[positions, head_dim]`, cosines in the
        first half of a row and sines in the second. May overwrite q and k.
        """
        ...

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """`silu(x[:, :n]) * x[:, n:]` for x `[T, 2 n]`: `[T, n]`."""
        ...

    def top_k(self, scores: Tensor, k: Tensor) -> Tensor:
        """float32 `[n, vocab]`: `scores` with -inf in place of all below the k-th highest of their row, for k
        int32 `[n]` from 1 to vocab. Equal ones all stay or none. The same on every call: see `top_p`."""
        ...

    def top_p(self, weights: Tensor, p: Tensor) -> Tensor:
        """float32 `[n, vocab]`: positive where `weights` (none negative) belong to the heaviest that together
        reach the share p float64 `[n]`, 0 < p <= 1, of their row's sum; else 0. Equal ones all stay or none.

        Equal weights are cut in the same place on every call, on any worker with these kernels: a retried
        request must draw the tokens that it drew before. So no sum may depend on the order of its terms.
        """
        ...
