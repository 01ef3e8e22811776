"""What holds of every set of kernels: attention against dense float64, the formulas of the other operations.

A test module takes all of it by `from tests.kernel_contract import *` and says in a fixture which `kernels`.
Each test draws new inputs; one that failed prints how it is repeated: `SEED=... pytest ...`.
"""

import math
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import AttentionBatch, Kernels
from workers.models.rope import RopeConfig, cos_sin_cache

CPU = torch.device("cpu")
NAN = float("nan")

# (query tokens, context tokens): whole prompts, chunks behind a cached prefix, decodes short and long.
RAGGED = [(7, 7), (1, 1), (5, 40), (1, 33), (1, 300), (16, 64), (1, 64), (2, 3), (1, 270)]


# Largest difference from float64, absolute and relative, of operations whose inputs and results are about 1.
TOLERANCE: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-5},
    torch.float16: {"atol": 4e-3, "rtol": 4e-3},
    torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2},
}


@pytest.fixture(autouse=True)
def fresh_inputs() -> int:
    seed = int(os.environ.get("SEED") or random.SystemRandom().randrange(2**31))
    print(f"SEED={seed} repeats this test")
    torch.manual_seed(seed)
    return seed


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    """What torch allocates is full of NaN, so that a value which a kernel does not write is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


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
        self.lens = lens
        spare = 2  # a block table may be longer than the context
        pages = [math.ceil(context / page_size) + spare for _, context in lens]
        ids = torch.randperm(sum(pages) + 5).tolist()
        tables = [[ids.pop() for _ in range(n)] for n in pages]
        self.batch = AttentionBatch([q for q, _ in lens], [c for _, c in lens], tables, page_size)
        self.q = torch.randn(self.batch.tokens, heads, head_dim, dtype=dtype)
        self.dense = [torch.randn(2, context, kv_heads, head_dim, dtype=dtype) for _, context in lens]
        self.layer_kv = torch.empty((sum(pages) + 5, 2, page_size, kv_heads, head_dim), dtype=dtype)
        self.fill()

    def fill(self) -> None:
        """Lay `dense` out in pages: the cached tokens in `layer_kv`, those and the new ones in `complete`."""
        lens, tables, page_size = self.lens, self.batch.block_tables, self.batch.page_size
        self.new = torch.cat([kv[:, -query:] for (query, _), kv in zip(lens, self.dense, strict=True)], dim=1)
        self.layer_kv.fill_(NAN)
        self.complete = self.layer_kv.clone()
        for (query, context), table, kv in zip(lens, tables, self.dense, strict=True):
            position = torch.arange(context)
            page, slot = torch.tensor(table)[position // page_size], position % page_size
            self.complete[page, :, slot] = kv.transpose(0, 1)
            cached = context - query
            self.layer_kv[page[:cached], :, slot[:cached]] = kv[:, :cached].transpose(0, 1)

    def run(self, kernels: Kernels, **options: Any) -> Tensor:
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

    def check(self, kernels: Kernels, window: int | None = None, cap: float | None = None) -> None:
        got = self.run(kernels, sliding_window=window, logit_soft_cap=cap)
        assert got.dtype is self.q.dtype
        torch.testing.assert_close(got.double(), self.expected(window, cap), **TOLERANCE[got.dtype])


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1), (16, 2)])
def test_attention_equals_dense_float64(kernels: Kernels, page_size: int, heads: int, kv_heads: int) -> None:
    PagedCase(page_size, heads, kv_heads).check(kernels)


@pytest.mark.parametrize("window", [None, 1, 6, 1000])
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_with_window_and_soft_cap(
    kernels: Kernels, dtype: torch.dtype, window: int | None, cap: float | None
) -> None:
    PagedCase(16, 6, 2, dtype=dtype).check(kernels, window, cap)


@pytest.mark.parametrize("head_dim", [24, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_attention_of_every_head_size(kernels: Kernels, page_size: int, head_dim: int) -> None:
    PagedCase(page_size, 6, 2, head_dim).check(kernels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [16, 24, 64, 80, 96, 128, 256])
def test_attention_in_half_precision(kernels: Kernels, dtype: torch.dtype, head_dim: int) -> None:
    PagedCase(16, 6, 2, head_dim, dtype).check(kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_a_long_context(kernels: Kernels, dtype: torch.dtype) -> None:
    """Longer than any block, and shared out among threads in parts."""
    case = PagedCase(16, 6, 2, 64, dtype, [(1, 3000), (130, 700), (3, 1500), (1, 1)])
    for window in (None, 200):
        case.check(kernels, window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_many_heads_over_one_key(kernels: Kernels, dtype: torch.dtype) -> None:
    PagedCase(16, 24, 2, 64, dtype, [(1, 3000), (1, 20), (2, 500), (40, 90)]).check(kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("growth", [30.0, -30.0])
def test_attention_whose_scores_grow_along_the_context(
    kernels: Kernels, dtype: torch.dtype, growth: float
) -> None:
    """What was summed up to a block counts next to nothing after the next one, or the other way around."""
    case = PagedCase(16, 4, 2, 64, dtype, [(300, 300), (1, 600), (200, 900)])
    for kv in case.dense:
        along = torch.linspace(0, growth, kv.shape[1])[:, None, None]
        kv[0] = (kv[0] * 0.1).to(dtype) + along.to(dtype)
    case.q = (case.q * 0.1).abs().to(dtype)
    case.fill()
    case.check(kernels)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [48, 77, 576])
def test_norms(kernels: Kernels, dtype: torch.dtype, width: int) -> None:
    x, residual, weight = (
        torch.randn(5, width, dtype=dtype),
        torch.randn(5, width, dtype=dtype),
        torch.rand(width).to(dtype),
    )

    def expected(of: Tensor) -> Tensor:
        wide = of.double()
        return wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    close = TOLERANCE[dtype]
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5).double(), expected(x), **close)
    total = x + residual
    normed, carried = kernels.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    torch.testing.assert_close(carried, total, rtol=0, atol=0)
    torch.testing.assert_close(normed.double(), expected(total), **close)


def test_norm_of_heads(kernels: Kernels) -> None:
    x, weight = torch.randn(5, 3, 16), torch.randn(16)
    by_row = kernels.rms_norm(x.reshape(15, 16), weight, 1e-6).view(5, 3, 16)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-6), by_row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(),
        RopeConfig(kind="linear", factor=3.0),
        RopeConfig(5e5, "llama3", 8.0, 64, 1.0, 4.0),
        RopeConfig(kind="yarn", factor=4.0, original_context_tokens=64, attention_factor=1.1386),
    ],
    ids=lambda rope: rope.kind,
)
def test_rope_is_a_complex_rotation(
    kernels: Kernels, rope: RopeConfig, head_dim: int, dtype: torch.dtype
) -> None:
    q, k = torch.randn(4, 3, head_dim, dtype=dtype), torch.randn(4, 1, head_dim, dtype=dtype)
    positions = torch.tensor([0, 99, 3, 3])
    cache = cos_sin_cache(rope, head_dim, 100)
    turned = kernels.rope(q.clone(), k.clone(), positions, cache)
    half = head_dim // 2
    cos, sin = cache.double()[positions, None].split(half, dim=-1)
    for x, got in zip((q, k), turned, strict=True):
        rotated = torch.complex(*x.double().split(half, dim=-1)) * torch.complex(cos, sin)
        expected = torch.cat((rotated.real, rotated.imag), dim=-1)
        assert got.dtype is dtype
        torch.testing.assert_close(got.double(), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width", "outputs"), [(4, 10, 7), (1, 64, 40), (33, 48, 100)])
def test_gated_activation_linear_and_embedding(
    kernels: Kernels, rows: int, width: int, outputs: int, dtype: torch.dtype
) -> None:
    x, bias = torch.randn(rows, width, dtype=dtype), torch.randn(outputs, dtype=dtype)
    weight = (torch.randn(outputs, width) / width**0.5).to(dtype)
    gate, up = x.double().chunk(2, dim=1)
    product = x.double() @ weight.double().T
    for got, expected in (
        (kernels.silu_and_mul(x), gate * gate.sigmoid() * up),
        (kernels.linear(x, weight), product),
        (kernels.linear(x, weight, bias), product + bias.double()),
    ):
        assert got.dtype is dtype
        torch.testing.assert_close(got.double(), expected, **TOLERANCE[dtype])
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
    x = torch.randn(3, 64).to(dtype)
    head = torch.randn(vocab, 64).to(dtype)
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
    weights = torch.rand(6, vocab) ** 4
    weights[1] = (weights[1] * 8).ceil() / 8  # ties
    weights[2, vocab // 3 :] = 0.0
    # From the lightest weight on: the share of those that are heavier.
    values, counts = zip(*(row.unique(return_counts=True) for row in weights.double()), strict=True)
    masses = [value * count for value, count in zip(values, counts, strict=True)]
    heavier = [1 - mass.cumsum(0) / mass.sum() for mass in masses]
    shares = [
        _between(row, share) for row, share in zip(heavier, (0.5, 0.7, 0.9, 1e-5, 0.99, 0.3), strict=True)
    ]
    kept = kernels.top_p(weights, torch.tensor(shares, dtype=torch.float64)) > 0
    assert torch.equal(kept, kernels.top_p(weights, torch.tensor(shares, dtype=torch.float64)) > 0)
    for i, own in enumerate(kept):
        lowest = values[i][heavier[i] < shares[i]].min()
        assert torch.equal(own, (weights[i].double() >= lowest) & (weights[i] > 0))


def _between(cuts: Tensor, share: float) -> float:
    """Close to `share` and far from any of `cuts`: float32 sums could cut on either side of it."""
    below, above = cuts[cuts <= share], cuts[cuts > share]
    return (float(below.max()) + (float(above.min()) if len(above) else 1.0)) / 2
