"""Decode steps under CUDA graphs against the same steps op by op."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from bench.gpu import shape
from kernels import AttentionBatch, load_kernels
from kernels.op_by_op import OpByOp

# Not imported here: `load_kernels` says first how.
pytestmark = pytest.mark.skipif(find_spec("flashinfer") is None, reason="FlashInfer is not installed")

PAGE_SIZE = 16
CONTEXTS = (5, 40, 17, 300, 1, 64, 33)


def test_a_replayed_step_equals_the_same_step_op_by_op() -> None:
    """Sizes that are captured, sizes that are padded, and the same graph with other contents."""
    cuda = torch.device("cuda")
    kernels = load_kernels("flashinfer", "cuda")
    torch.manual_seed(0)
    decoder = shape.decoder(shape.TINY, cuda)
    decoder = replace(decoder, layers=list(decoder.layers))  # read twice
    graphed, eager = kernels.compile(decoder), OpByOp(kernels, decoder)
    pool = torch.randn(shape.TINY.pool(64, PAGE_SIZE), device=cuda).to(torch.bfloat16)
    for rows in (1, 3, 7, 4, 3, 2, 7):
        contexts = list(CONTEXTS[-rows:])
        ids = iter(torch.randperm(64).tolist())
        tables = [[next(ids) for _ in range(-(-context // PAGE_SIZE))] for context in contexts]
        batch = AttentionBatch([1] * rows, contexts, tables, PAGE_SIZE)
        tokens = torch.randint(0, shape.TINY.vocab, (rows,), device=cuda)
        positions = torch.tensor(contexts, device=cuda) - 1
        wanted = torch.arange(rows, device=cuda)
        untouched = pool.clone()
        with torch.inference_mode():
            plain = eager(tokens, positions, untouched, kernels.plan(batch, cuda), None, wanted)
            logits = graphed(tokens, positions, pool, kernels.plan(batch, cuda), None, wanted)
        torch.testing.assert_close(logits, plain, atol=5e-2, rtol=5e-2)
        torch.testing.assert_close(pool, untouched, atol=2e-2, rtol=2e-2)


def test_a_layer_is_ready_only_after_the_device_reached_it() -> None:
    event = torch.cuda.Event()
    torch.cuda._sleep(200_000_000)
    event.record()
    assert not event.query()
    torch.cuda.synchronize()
    assert event.query()
