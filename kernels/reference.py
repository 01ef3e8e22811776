"""The kernels in plain torch: any device, any dtype. The others are tested against these."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.base import AttentionBatch
from kernels.decoder import Decoder, ForwardPass
from kernels.op_by_op import OpByOp
from kernels.quantized_matrix import Matrix, dense

_EXACT_LOGITS = 64
_SHORT_CONTEXT_TOKENS = 256  # decode rows up to here share a group whatever their length


@dataclass(frozen=True, slots=True)
class _Group:
    """Requests with the same number of queries, attended in one call: n requests, padded to L tokens."""

    rows: Tensor  # int64 [n, queries]: rows of q
    slots: Tensor  # int64 [n, L]: where the keys are; a padded entry repeats the request's first slot
    contexts: Tensor  # int64 [n]
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, sliding_window: int | None) -> Tensor:
        """bool [n, 1, queries, L]: which keys a query sees. Computed once a step, for all layers."""
        if sliding_window not in self._masks:
            queries, length = self.rows.shape[1], self.slots.shape[1]
            key = torch.arange(length, device=self.slots.device)
            query = self.contexts[:, None] - queries + torch.arange(queries, device=self.slots.device)
            seen = key <= query[..., None]
            if sliding_window is not None:
                seen &= key > query[..., None] - sliding_window
            self._masks[sliding_window] = seen[:, None]
        return self._masks[sliding_window]


@dataclass(frozen=True, slots=True)
class Plan:
    append_slots: Tensor  # int64 [T]
    groups: list[_Group]
    page_size: int


class ReferenceKernels:
    """See `kernels.base.Kernels`.

    A slot is one token's row in a layer's KV seen as `[pages * 2 * page_size, kv_heads * head_dim]`: its
    key is there and its value `page_size` rows later.
    """

    name = "reference"
    keeps_quantized = False

    def compile(self, decoder: Decoder) -> ForwardPass:
        return OpByOp(self, decoder.dense())

    def warm_rows(self, max_rows: int) -> list[int]:
        return [1]

    def plan(self, batch: AttentionBatch, device: torch.device) -> Plan:
        batch.check()
        slots = [
            _slots(table, context, batch.page_size)
            for table, context in zip(batch.block_tables, batch.context_lens_tokens, strict=True)
        ]
        append = [own[-query:] for own, query in zip(slots, batch.query_lens_tokens, strict=True)]
        groups = [_group(batch, slots, members, device) for members in _members(batch)]
        return Plan(torch.cat(append).to(device), groups, batch.page_size)

    def append(self, k: Tensor, v: Tensor, layer_kv: Tensor, plan: Plan) -> None:
        flat = _flat(layer_kv)
        flat.index_copy_(0, plan.append_slots, k.reshape(len(k), -1))
        flat.index_copy_(0, plan.append_slots + plan.page_size, v.reshape(len(v), -1))

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
        out = torch.empty_like(q)
        for group in plan.groups:
            k = _gather(layer_kv, group.slots)
            v = _gather(layer_kv, group.slots + plan.page_size)
            mask = group.mask(sliding_window)
            queries = q[group.rows]
            if logit_soft_cap is not None:
                attended = _soft_capped(queries.transpose(1, 2), k, v, mask, scale, logit_soft_cap)
            elif queries.shape[1] == 1:
                # The heads that share keys become the queries of one head: no copy of k and v per head.
                folded = queries.view(len(queries), k.shape[1], -1, q.shape[-1])
                attended = F.scaled_dot_product_attention(folded, k, v, mask, scale=scale)
                attended = attended.flatten(1, 2).unsqueeze(2)
            else:
                attended = F.scaled_dot_product_attention(
                    queries.transpose(1, 2), k, v, mask, scale=scale, enable_gqa=True
                )
            out[group.rows] = attended.transpose(1, 2)
        return out

    def embedding(self, tokens: Tensor, weight: Tensor) -> Tensor:
        return F.embedding(tokens, weight)

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, dense(weight, x.dtype), bias)

    def logits(self, x: Tensor, head: Tensor) -> Tensor:
        if x.dtype is torch.float32:
            return F.linear(x, head)
        if not len(x):  # a chunk in the middle of a prompt
            return torch.empty(0, len(head), dtype=torch.float32, device=x.device)
        if x.is_cuda:
            return torch.mm(x, head.T, out_dtype=torch.float32)
        # On a CPU torch has no float32 result of a product in 16 bits, and widening the head takes three
        # times as long: only those that may be chosen are computed again.
        logits = F.linear(x, head).float()
        highest = logits.topk(min(_EXACT_LOGITS, len(head)), sorted=False).indices
        exact = torch.bmm(head[highest].float(), x.float().unsqueeze(2)).squeeze(2)
        return logits.scatter_(1, highest, exact)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual = residual + x
        return self.rms_norm(residual, weight, eps), residual

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def top_k(self, scores: Tensor, k: Tensor) -> Tensor:
        lowest = scores.sort(dim=-1, descending=True).values.gather(1, k.long()[:, None] - 1)
        return scores.masked_fill(scores < lowest, -torch.inf)

    def top_p(self, weights: Tensor, p: Tensor) -> Tensor:
        descending = weights.sort(dim=-1, descending=True).values
        cumulated = descending.cumsum(-1, dtype=torch.float64)
        reached = torch.searchsorted(cumulated, p[:, None] * cumulated[:, -1:])
        lowest = descending.gather(1, reached.clamp_(max=weights.shape[1] - 1))
        return weights * (weights >= lowest)


def _flat(layer_kv: Tensor) -> Tensor:
    return layer_kv.view(-1, layer_kv.shape[-2] * layer_kv.shape[-1])


def _gather(layer_kv: Tensor, slots: Tensor) -> Tensor:
    """[n, kv_heads, L, head_dim] for slots [n, L]."""
    rows = _flat(layer_kv).index_select(0, slots.flatten())
    return rows.view(*slots.shape, *layer_kv.shape[-2:]).transpose(1, 2)


def _slots(table: Sequence[int], context_tokens: int, page_size: int) -> Tensor:
    positions = torch.arange(context_tokens)
    pages = torch.as_tensor(table, dtype=torch.int64)[positions // page_size]
    return pages * (2 * page_size) + positions % page_size


def _members(batch: AttentionBatch) -> list[list[int]]:
    """Split requests into groups: each prefill alone, decodes with others less than twice as long."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, (query, context) in enumerate(
        zip(batch.query_lens_tokens, batch.context_lens_tokens, strict=True)
    ):
        key = (-1, max(context, _SHORT_CONTEXT_TOKENS).bit_length()) if query == 1 else (i, 0)
        groups[key].append(i)
    return list(groups.values())


def _group(batch: AttentionBatch, slots: list[Tensor], members: list[int], device: torch.device) -> _Group:
    starts = torch.tensor(batch.query_lens_tokens).cumsum(0) - torch.tensor(batch.query_lens_tokens)
    rows = starts[members][:, None] + torch.arange(batch.query_lens_tokens[members[0]])
    padded = slots[members[0]].new_empty(len(members), max(len(slots[i]) for i in members))
    for row, i in zip(padded, members, strict=True):
        row[: len(slots[i])] = slots[i]
        # Masking a value does not help against NaN (0 * NaN), so padding reads what was surely written.
        row[len(slots[i]) :] = slots[i][0]
    contexts = torch.tensor([batch.context_lens_tokens[i] for i in members])
    return _Group(rows.to(device), padded.to(device), contexts.to(device))


def _soft_capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float) -> Tensor:
    """Attention of q [n, heads, queries, d] over k, v [n, kv_heads, L, d] with capped scores."""
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1).float(), v.repeat_interleave(shared, 1).float()
    scores = cap * torch.tanh(q.float() @ k.transpose(-1, -2) * (scale / cap))
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return (weights @ v).to(q.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
