"""Decode steps as CUDA graphs: captured once for each of a few batch sizes, replayed with new contents."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernels.base import AttentionBatch
from kernels.decoder import Decoder
from kernels.op_by_op import OpByOp

if TYPE_CHECKING:
    from kernels.base import Kernels, Plan

logger = logging.getLogger(__name__)

# A step of n rows replays the next larger graph, so the gaps bound the rows computed in vain.
ROWS = (1, 2, 4, *range(8, 64, 8), *range(64, 257, 32))


def graph_rows(max_rows: int) -> list[int]:
    """Ascending: the sizes needed for steps of up to `max_rows` rows. Larger ones than the last have none."""
    needed = [rows for rows in ROWS if rows < max_rows]
    return needed + [rows for rows in ROWS if rows >= max_rows][:1]


def padded(batch: AttentionBatch, rows: int) -> AttentionBatch:
    """`batch` of decodes with `rows` of them. What is added repeats the shortest request, whose new KV is
    written once more as it is: no page has to be set aside for rows that nobody wants."""
    repeated = [shortest(batch)] * (rows - len(batch.context_lens_tokens))
    order = [*range(len(batch.context_lens_tokens)), *repeated]
    contexts = [batch.context_lens_tokens[i] for i in order]
    return AttentionBatch([1] * rows, contexts, [batch.block_tables[i] for i in order], batch.page_size)


def shortest(batch: AttentionBatch) -> int:
    return min(range(len(batch.context_lens_tokens)), key=batch.context_lens_tokens.__getitem__)


class GraphedPass:
    """See `kernels.decoder.ForwardPass`. Steps of decodes replay a graph, all others run op by op.

    A size is captured when it first comes: whoever warms up runs each once. The logits of a graph are valid
    until the next step.
    """

    def __init__(self, kernels: Kernels, decoder: Decoder, new_plan: Callable[[int, Tensor], Plan]) -> None:
        """`new_plan(rows, pages)` makes a plan that reads int32 `pages` and can be loaded with any batch of
        `rows` decodes that fits into them."""
        self._op_by_op = OpByOp(kernels, decoder)
        self._max_tokens = len(decoder.cos_sin)
        self._new_plan = new_plan
        self._graphs: dict[int, DecodeGraph] = {}
        self._pages: Tensor | None = None
        self._memory: Any = torch.cuda.graph_pool_handle()

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv: Tensor,
        plan: Plan,
        on_layer: Callable[[int], None] | None,
        logit_rows: Tensor,
        group_layers: int = 1,
    ) -> Tensor:
        if on_layer is not None or len(tokens) > ROWS[-1] or not plan.batch.decodes_only:
            return self._op_by_op(tokens, positions, kv, plan, on_layer, logit_rows, group_layers)
        rows = graph_rows(len(tokens))[-1]
        graph = self._graphs.get(rows)
        if graph is None:
            started = time.monotonic()
            graph = self._graphs[rows] = DecodeGraph(rows, kv, self._plan(rows, kv))
            graph.load(tokens, positions, plan.batch, logit_rows)
            graph.capture(self._op_by_op, self._memory)
            logger.info("decode_graph_captured rows=%d seconds=%.2f", rows, time.monotonic() - started)
        else:
            graph.load(tokens, positions, plan.batch, logit_rows)
        return graph.replay(kv)[: len(logit_rows)]

    def _plan(self, rows: int, kv: Tensor) -> Plan:
        """A plan with room for the longest contexts; one table of pages serves all sizes."""
        _, pool_pages, _, page_size, *_ = kv.shape
        needed = rows * min(pool_pages, -(-self._max_tokens // page_size))
        if self._pages is None or len(self._pages) < needed:
            self._pages = torch.zeros(needed, dtype=torch.int32, device=kv.device)
        return self._new_plan(rows, self._pages)


class DecodeGraph:
    """One size: what a step is loaded into, and the graph that reads it."""

    def __init__(self, rows: int, kv: Tensor, plan: Plan) -> None:
        self._rows = rows
        self._kv = kv
        self._plan = plan
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=kv.device)
        self._positions = torch.zeros_like(self._tokens)
        self._logit_rows = torch.zeros_like(self._tokens)

    def load(self, tokens: Tensor, positions: Tensor, batch: AttentionBatch, logit_rows: Tensor) -> None:
        """A step of at most as many rows."""
        self._plan.load(padded(batch, self._rows))
        filler = shortest(batch)
        for own, given in ((self._tokens, tokens), (self._positions, positions)):
            own[: len(given)].copy_(given)
            own[len(given) :] = given[filler]
        self._logit_rows[: len(logit_rows)].copy_(logit_rows)

    def step(self, run: OpByOp) -> Tensor:
        """What is loaded, op by op."""
        return run(self._tokens, self._positions, self._kv, self._plan, None, self._logit_rows)

    def capture(self, run: OpByOp, memory: Any) -> None:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self.step(run)  # loads modules, plans, and allocates what libraries keep
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may go on talking to the device.
        with torch.cuda.graph(self._graph, pool=memory, capture_error_mode="thread_local"):
            self._logits = self.step(run)

    def replay(self, kv: Tensor) -> Tensor:
        """float32 `[rows, vocab]`."""
        assert kv.data_ptr() == self._kv.data_ptr(), "a graph goes on writing the pool it was captured with"
        self._graph.replay()
        return self._logits
