"""Decode steps through graphs against the same steps op by op. The graph is played: what a replay would run
on the device is run again on the CPU, on the same memory."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from bench.gpu import shape
from kernels.base import AttentionBatch
from kernels.cuda_graphs import DecodeGraph, GraphedPass
from kernels.op_by_op import OpByOp
from kernels.reference import Plan, ReferenceKernels

CPU = torch.device("cpu")
PAGE_SIZE = 16
PAGES = 64
CONTEXTS = (5, 40, 17, 300, 1, 64, 33)


class PlayedPlan:
    """Of a step, or, loaded again and again, of a graph."""

    def __init__(self, batch: AttentionBatch | None = None) -> None:
        if batch is not None:
            self.load(batch)

    def load(self, batch: AttentionBatch) -> None:
        self.batch = batch
        self.reference: Plan = ReferenceKernels().plan(batch, CPU)


class PlayedKernels(ReferenceKernels):
    def append(self, k: Tensor, v: Tensor, layer_kv: Tensor, plan: Any) -> None:
        super().append(k, v, layer_kv, plan.reference)

    def attention(self, q: Tensor, layer_kv: Tensor, plan: Any, **options: Any) -> Tensor:
        return super().attention(q, layer_kv, plan.reference, **options)


class Rig:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captured: list[int] = []
        self.plans: list[tuple[int, int]] = []

        def capture(graph: DecodeGraph, run: OpByOp, memory: Any) -> None:
            self.captured.append(len(graph._tokens))
            replay = SimpleNamespace(replay=lambda: setattr(graph, "_logits", graph.step(run)))
            graph._graph = cast(torch.cuda.CUDAGraph, replay)

        def new_plan(rows: int, pages: Tensor) -> PlayedPlan:
            self.plans.append((rows, len(pages)))
            return PlayedPlan()

        monkeypatch.setattr(DecodeGraph, "capture", capture)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        torch.manual_seed(0)
        decoder = shape.decoder(shape.TINY, CPU)
        decoder = replace(decoder, layers=list(decoder.layers))  # read twice
        self.graphed = GraphedPass(PlayedKernels(), decoder, new_plan)
        self.op_by_op = OpByOp(PlayedKernels(), decoder)
        self.pool = torch.randn(shape.TINY.pool(PAGES, PAGE_SIZE)).to(torch.bfloat16)

    def compare(self, queries: list[int], contexts: list[int], wanted: list[int]) -> None:
        ids = iter(torch.randperm(PAGES).tolist())
        tables = [[next(ids) for _ in range(-(-context // PAGE_SIZE))] for context in contexts]
        plan = PlayedPlan(AttentionBatch(queries, contexts, tables, PAGE_SIZE))
        tokens = torch.randint(0, shape.TINY.vocab, (sum(queries),))
        positions = torch.cat([torch.arange(c - q, c) for q, c in zip(queries, contexts, strict=True)])
        expected_pool = self.pool.clone()
        rows = torch.tensor(wanted, dtype=torch.int64)
        expected = self.op_by_op(tokens, positions, expected_pool, plan, None, rows)
        logits = self.graphed(tokens, positions, self.pool, plan, None, rows)
        torch.testing.assert_close(logits, expected, atol=3e-2, rtol=3e-2)
        torch.testing.assert_close(self.pool, expected_pool, atol=2e-2, rtol=2e-2)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_replayed_steps_equal_those_run_op_by_op(rig: Rig) -> None:
    for rows in (7, 1, 3, 4, 2, 7, 3):
        rig.compare([1] * rows, list(CONTEXTS[-rows:]), list(range(rows)))
    assert rig.captured == [8, 1, 4, 2], "each size once"


def test_logits_come_in_the_order_asked_for(rig: Rig) -> None:
    rig.compare([1] * 7, list(CONTEXTS), [6, 0, 3])
    rig.compare([1] * 7, list(CONTEXTS), [])


def test_a_step_with_a_prompt_has_no_graph(rig: Rig) -> None:
    rig.compare([1, 20, 1], [5, 40, 17], [0, 1, 2])
    assert rig.captured == []


def test_layers_are_told_of_only_without_a_graph(rig: Rig) -> None:
    plan = PlayedPlan(AttentionBatch([1], [3], [[0]], PAGE_SIZE))
    one = torch.tensor([2])
    told: list[int] = []
    rig.graphed(one, one, rig.pool, plan, told.append, one * 0)
    assert told == list(range(shape.TINY.layers))
    assert rig.captured == []


def test_the_tables_hold_the_longest_contexts(rig: Rig) -> None:
    rig.compare([1] * 3, [5, 6, 7], [0, 1, 2])
    assert rig.plans == [(4, 4 * PAGES)], "no request can fill more than the pool"


def test_another_pool_is_refused(rig: Rig) -> None:
    rig.compare([1], [5], [0])
    rig.pool = rig.pool.clone()
    with pytest.raises(AssertionError, match="pool"):
        rig.compare([1], [5], [0])
