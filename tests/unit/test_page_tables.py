"""A batch's page tables against the slots that the reference computes, and what pads a graph."""

import random

import pytest
import torch

from kernels.base import AttentionBatch
from kernels.cuda_graphs import ROWS, graph_rows, padded
from kernels.page_tables import PageTables
from kernels.reference import ReferenceKernels

CPU = torch.device("cpu")


def random_batch(rng: random.Random, page_size: int) -> AttentionBatch:
    contexts = [rng.randint(1, 5 * page_size) for _ in range(rng.randint(1, 9))]
    queries = [rng.randint(1, context) for context in contexts]
    ids = rng.sample(range(1000), 200)
    tables = [
        [ids.pop() for _ in range(-(-context // page_size) + rng.randint(0, 2))] for context in contexts
    ]
    return AttentionBatch(queries, contexts, tables, page_size)


@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
@pytest.mark.parametrize("seed", range(20))
def test_new_tokens_lie_where_the_reference_puts_them(page_size: int, seed: int) -> None:
    batch = random_batch(random.Random(seed), page_size)
    tables = PageTables.of(batch).to(CPU)
    assert all(table.dtype == torch.int32 for table in tables)
    entries = tables.page_starts[tables.token_requests.long()] + tables.token_positions // page_size
    slots = tables.pages[entries.long()] * 2 * page_size + tables.token_positions % page_size
    assert torch.equal(slots.long(), ReferenceKernels().plan(batch, CPU).append_slots)


@pytest.mark.parametrize("seed", range(20))
def test_lengths_add_up(seed: int) -> None:
    batch = random_batch(random.Random(seed), 16)
    tables = PageTables.of(batch)
    assert tables.query_starts.diff().tolist() == batch.query_lens_tokens
    filled = (tables.page_starts.diff() - 1) * 16 + tables.last_page_tokens
    assert filled.tolist() == batch.context_lens_tokens
    assert ((tables.last_page_tokens >= 1) & (tables.last_page_tokens <= 16)).all()
    assert len(tables.pages) == tables.page_starts[-1]


def test_padding_repeats_the_shortest_request() -> None:
    batch = AttentionBatch([1, 1, 1], [40, 3, 17], [[1, 2, 3], [4], [5, 6]], 16)
    more = padded(batch, 5)
    assert more == AttentionBatch([1] * 5, [40, 3, 17, 3, 3], [[1, 2, 3], [4], [5, 6], [4], [4]], 16)
    assert padded(batch, 3) == batch
    more.check()


@pytest.mark.parametrize("max_rows", [1, 2, 3, 5, 8, 9, 64, 65, 256, 1000])
def test_every_step_has_a_graph_of_about_its_size(max_rows: int) -> None:
    sizes = graph_rows(max_rows)
    assert sizes == sorted(set(sizes))
    for rows in range(1, min(max_rows, ROWS[-1]) + 1):
        size = graph_rows(rows)[-1]
        assert size in sizes, "warmed up for the largest step, every smaller one is there"
        assert rows <= size < rows + 32
        assert size < 2 * rows or rows in (1, 5)
