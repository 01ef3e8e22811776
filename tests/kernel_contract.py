"""What holds of every set of kernels: attention against dense float64, the formulas of the other operations.

A test module takes all of it by `from tests.kernel_contract import *` and says in a fixture which `kernels`.
"""

import math

import pytest
import torch
from torch import Tensor

from kernels import AttentionBatch, Kernels

CPU = torch.device("cpu")
NAN = float("nan")

# (query tokens, context tokens): whole prompts, chunks behind a cached prefix, decodes short and long.
RAGGED = [(7, 7), (1, 1), (5, 40), (1, 33), (1, 300), (16, 64), (1, 64), (2, 3), (1, 270)]


class PagedCase:
    """A random batch: the dense keys and values of each request, and a pool that holds the cached ones.

    All the pool holds besides cached tokens is NaN.
    """

    def __init__(
        self,
        page_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int = 16,
        dtype: torch.dtype = torch.float32,
        lens: list[tuple[int, int]] = RAGGED,
    ) -> None:
        torch.manual_seed(page_size * 100 + heads)
        self.lens = lens
        spare = 2  # a block table may be longer than the context
        pages = [math.ceil(context / page_size) + spare for _, context in lens]
        ids = torch.randperm(sum(pages) + 5).tolist()
        tables = [[ids.pop() for _ in range(n)] for n in pages]
        self.batch = AttentionBatch([q for q, _ in lens], [c for _, c in lens], tables, page_size)
        self.q = torch.randn(self.batch.tokens, heads, head_dim, dtype=dtype)
        self.dense = [torch.randn(2, context, kv_heads, head_dim, dtype=dtype) for _, context in lens]
        self.new = torch.cat([kv[:, -query:] for (query, _), kv in zip(lens, self.dense, strict=True)], dim=1)
        self.layer_kv = torch.full((sum(pages) + 5, 2, page_size, kv_heads, head_dim), NAN, dtype=dtype)
        self.complete = self.layer_kv.clone()
        for (query, context), table, kv in zip(lens, tables, self.dense, strict=True):
            for position in range(context):
                page, slot = table[position // page_size], position % page_size
                self.complete[page, :, slot] = kv[:, position]
                if position < context - query:
                    self.layer_kv[page, :, slot] = kv[:, position]

    def run(self, kernels: Kernels, **options: float | None) -> Tensor:
        plan = kernels.plan(self.batch, CPU)
        kernels.append(self.new[0], self.new[1], self.layer_kv, plan)
        return kernels.attention(self.q, self.layer_kv, plan, scale=0.2, **options)

    def expected(self, sliding_window: int | None = None, logit_soft_cap: float | None = None) -> Tensor:
        rows, start = [], 0
        for (query, context), kv in zip(self.lens, self.dense, strict=True):
            q = self.q[start : start + query].double()
            shared = q.shape[1] // kv.shape[2]
            k, v = kv.double().repeat_interleave(shared, dim=2)
            scores = torch.einsum("qhd,khd->hqk", q, k) * 0.2
            if logit_soft_cap is not None:
                scores = logit_soft_cap * torch.tanh(scores / logit_soft_cap)
            at = torch.arange(context - query, context)[:, None]
            key = torch.arange(context)
            seen = key <= at
            if sliding_window is not None:
                seen &= at - key < sliding_window
            weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
            rows.append(torch.einsum("hqk,khd->qhd", weights, v))
            start += query
        return torch.cat(rows)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_attention_equals_dense_float64(kernels: Kernels, page_size: int, heads: int, kv_heads: int) -> None:
    case = PagedCase(page_size, heads, kv_heads)
    torch.testing.assert_close(case.run(kernels).double(), case.expected(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sliding_window", [None, 1, 6, 1000])
@pytest.mark.parametrize("logit_soft_cap", [None, 1.5])
def test_attention_with_window_and_soft_cap(
    kernels: Kernels, sliding_window: int | None, logit_soft_cap: float | None
) -> None:
    case = PagedCase(16, 6, 2)
    got = case.run(kernels, sliding_window=sliding_window, logit_soft_cap=logit_soft_cap)
    torch.testing.assert_close(
        got.double(), case.expected(sliding_window, logit_soft_cap), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("head_dim", [24, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("page_size", [1, 64])
def test_attention_of_every_head_size(kernels: Kernels, page_size: int, head_dim: int) -> None:
    case = PagedCase(page_size, 6, 2, head_dim)
    torch.testing.assert_close(case.run(kernels).double(), case.expected(), atol=1e-5, rtol=1e-5)


def test_attention_over_a_long_context(kernels: Kernels) -> None:
    """Longer than any block, and shared out among threads in parts."""
    case = PagedCase(16, 6, 2, 64, lens=[(1, 3000), (130, 700), (3, 1500), (1, 1)])
    for window in (None, 200):
        got = case.run(kernels, sliding_window=window)
        torch.testing.assert_close(got.double(), case.expected(window), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [16, 80])
def test_attention_in_half_precision(kernels: Kernels, dtype: torch.dtype, head_dim: int) -> None:
    case = PagedCase(16, 6, 2, head_dim, dtype=dtype)
    torch.testing.assert_close(case.run(kernels).double(), case.expected(), atol=3e-2, rtol=2e-2)


def test_one_plan_serves_layers_with_different_windows(kernels: Kernels) -> None:
    case = PagedCase(16, 4, 2)
    case.run(kernels)
    plan = kernels.plan(case.batch, CPU)
    for window in (None, 3, None, 9):
        got = kernels.attention(case.q, case.layer_kv, plan, scale=0.2, sliding_window=window)
        torch.testing.assert_close(got.double(), case.expected(window), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_append_writes_the_new_tokens_and_nothing_else(kernels: Kernels, page_size: int) -> None:
    case = PagedCase(page_size, 4, 2)
    kernels.append(case.new[0], case.new[1], case.layer_kv, kernels.plan(case.batch, CPU))
    torch.testing.assert_close(case.layer_kv, case.complete, rtol=0, atol=0, equal_nan=True)


def test_append_takes_views_of_a_fused_projection(kernels: Kernels) -> None:
    case = PagedCase(16, 4, 2)
    fused = torch.cat((case.q, case.new[0], case.new[1]), dim=1)
    _, k, v = torch.split(fused, [4, 2, 2], dim=1)
    kernels.append(k, v, case.layer_kv, kernels.plan(case.batch, CPU))
    torch.testing.assert_close(case.layer_kv, case.complete, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "batch",
    [
        AttentionBatch([0], [4], [[0]], 16),
        AttentionBatch([5], [4], [[0]], 16),
        AttentionBatch([1], [17], [[0]], 16),
        AttentionBatch([1, 1], [4], [[0]], 16),
    ],
    ids=["no query", "query beyond context", "too few pages", "ragged lists"],
)
def test_plan_refuses_an_impossible_batch(kernels: Kernels, batch: AttentionBatch) -> None:
    with pytest.raises(AssertionError):
        kernels.plan(batch, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(kernels: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, weight = (
        torch.randn(5, 48, dtype=dtype),
        torch.randn(5, 48, dtype=dtype),
        torch.randn(48).to(dtype),
    )

    def expected(of: Tensor) -> Tensor:
        wide = of.double()
        return wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5).double(), expected(x), **close)
    total = x + residual
    normed, carried = kernels.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    torch.testing.assert_close(carried, total, rtol=0, atol=0)
    torch.testing.assert_close(normed.double(), expected(total), **close)


def test_norm_of_heads(kernels: Kernels) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 3, 16), torch.randn(16)
    by_row = kernels.rms_norm(x.reshape(15, 16), weight, 1e-6).view(5, 3, 16)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-6), by_row)


def test_rope_is_a_complex_rotation(kernels: Kernels) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(4, 3, 8), torch.randn(4, 1, 8)
    angles = torch.rand(10, 4) * 6
    positions = torch.tensor([0, 9, 3, 3])
    turned_q, turned_k = kernels.rope(
        q.clone(), k.clone(), positions, torch.cat((angles.cos(), angles.sin()), dim=-1)
    )
    turn = torch.polar(torch.ones(4, 1, 4), angles[positions][:, None])
    for x, got in ((q, turned_q), (k, turned_k)):
        expected = torch.complex(x[..., :4], x[..., 4:]) * turn
        torch.testing.assert_close(got, torch.cat((expected.real, expected.imag), dim=-1))


def test_gated_activation_linear_and_embedding(kernels: Kernels) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(4, 10), torch.randn(7, 10), torch.randn(7)
    gate, up = x[:, :5], x[:, 5:]
    torch.testing.assert_close(kernels.silu_and_mul(x), gate / (1 + (-gate).exp()) * up)
    torch.testing.assert_close(kernels.linear(x, weight), x @ weight.T)
    torch.testing.assert_close(kernels.linear(x, weight, bias), x @ weight.T + bias)
    assert torch.equal(kernels.embedding(torch.tensor([6, 0, 6]), weight), weight[[6, 0, 6]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_activation_far_from_zero(kernels: Kernels, dtype: torch.dtype) -> None:
    gate = torch.tensor([[-200.0, -88.0, -20.0, -1e-3, 0.0, 1e-3, 20.0, 88.0, 200.0, 3.0, -3.0]], dtype=dtype)
    got = kernels.silu_and_mul(torch.cat((gate, torch.full_like(gate, 0.5)), dim=1))
    expected = gate.double() * gate.double().sigmoid() * 0.5
    torch.testing.assert_close(
        got.double(), expected, atol=1e-30, rtol=1e-5 if dtype == torch.float32 else 1e-2
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [40, 5001])
def test_the_highest_logits_are_exact(kernels: Kernels, dtype: torch.dtype, vocab: int) -> None:
    """Rounded to 16 bits the best tokens of a large vocabulary tie, and greedy text goes wrong."""
    generator = torch.Generator().manual_seed(vocab)
    x = torch.randn(3, 64, generator=generator).to(dtype)
    head = torch.randn(vocab, 64, generator=generator).to(dtype)
    expected = x.double() @ head.double().T
    found = kernels.logits(x, head)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=0.1)
    best = expected.topk(8).indices
    torch.testing.assert_close(found.double().gather(1, best), expected.gather(1, best), rtol=1e-5, atol=1e-4)


def test_no_rows_no_logits(kernels: Kernels) -> None:
    head = torch.ones(100, 8, dtype=torch.bfloat16)
    assert kernels.logits(torch.empty(0, 8, dtype=torch.bfloat16), head).shape == (0, 100)


@pytest.mark.parametrize("vocab", [7, 1000, 20_000])
def test_top_k_keeps_what_is_as_high_as_the_kth(kernels: Kernels, vocab: int) -> None:
    torch.manual_seed(vocab)
    scores = torch.randn(6, vocab)
    scores[1] = scores[1].round()  # ties
    scores[2, : vocab // 2] = -torch.inf
    k = torch.tensor([1, 3, 5, 2, vocab, vocab - 1], dtype=torch.int32)
    kept = kernels.top_k(scores, k)
    for row, own, count in zip(scores, kept, k.tolist(), strict=True):
        lowest = sorted(row.tolist())[-count]
        torch.testing.assert_close(own, torch.where(row >= lowest, row, -torch.inf), rtol=0, atol=0)


@pytest.mark.parametrize("vocab", [7, 1000, 20_000])
def test_top_p_keeps_the_heaviest_that_reach_the_share(kernels: Kernels, vocab: int) -> None:
    torch.manual_seed(vocab)
    weights = torch.rand(6, vocab) ** 4
    weights[1] = (weights[1] * 8).round() / 8  # ties
    weights[2, vocab // 3 :] = 0.0
    shares = [0.5, 0.7, 0.9, 1e-5, 0.99, 0.3]
    kept = kernels.top_p(weights, torch.tensor(shares, dtype=torch.float64)) > 0
    assert torch.equal(kept, kernels.top_p(weights, torch.tensor(shares, dtype=torch.float64)) > 0)
    for row, own, share in zip(weights.double(), kept, shares, strict=True):
        heavier = torch.stack([row[row > weight].sum() for weight in row.unique()]) / row.sum()
        distance = (heavier - share).abs().min()
        assert distance > 1e-6, "float32 sums could cut on either side"
        lowest = row.unique()[heavier < share].min()
        assert torch.equal(own, (row >= lowest) & (row > 0))
