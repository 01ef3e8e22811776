"""Steps of the default model in bfloat16, by the C++ kernels and by plain torch, beside the machine's limits.

A step's floor is the longer of two times: its weights, in the bits they are packed in, and KV read at the
control's rate, and its products computed at the control's. The controls run right before and after the
repeats of a step, and the better one counts: on shared machines they change within seconds.
"""

from collections.abc import Iterator
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch

from app.measure.table import show
from bench import machine
from kernels import AttentionBatch, Kernels
from kernels.cpu import CpuKernels, NativePass
from kernels.reference import ReferenceKernels
from relay.model_file import default_model_path
from workers.engine.kv_pool import KVPool
from workers.models import Model, load_model

PAGE_SIZE = 16
CONTEXT_TOKENS = 512
DECODES = (1, 4, 8, 16)
PREFILLS = (512, 2048, 4000)
REPEATS_OF_REFERENCE = 1


class Step(NamedTuple):
    """`requests` times `query` new tokens, the last of `context` tokens."""

    name: str
    requests: int
    query: int
    context: int
    repeats: int


STEPS = [Step(f"decode {n} of {CONTEXT_TOKENS}", n, 1, CONTEXT_TOKENS, 15) for n in DECODES]
STEPS += [Step(f"prefill {n}", 1, n, n, 3) for n in PREFILLS]


def run() -> None:
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        rows = list(_rows(threads))
        header = ("", "ms", "least ms", "floor ms", "% of floor", "tokens/s", "torch ms", "times torch")
        show(f"Steps, threads: {threads}", header, rows)
    torch.set_num_threads(before)


def _rows(threads: int) -> Iterator[tuple[object, ...]]:
    fast = _times(CpuKernels(threads=threads), threads)
    slow = [median(times) for times, _ in _times(ReferenceKernels(), threads, REPEATS_OF_REFERENCE)]
    for step, (times, floor_s), torch_s in zip(STEPS, fast, slow):
        taken = median(times)
        yield (
            step.name,
            taken * 1e3,
            min(times) * 1e3,
            floor_s * 1e3,
            100 * floor_s / taken,
            step.requests * step.query / taken,
            torch_s * 1e3,
            torch_s / taken,
        )


def _times(kernels: Kernels, threads: int, repeats: int | None = None) -> list[tuple[list[float], float]]:
    """Seconds of each repeat, and the floor, of every step."""
    model = load_model(default_model_path(), "bfloat16", "cpu", kernels, "dtype")
    pages = max(step.requests * -(-step.context // PAGE_SIZE) for step in STEPS)
    kv = KVPool.allocate(model.config.kv_shape(pages, PAGE_SIZE), model.dtype, model.device)
    results = []
    for step in STEPS:
        control = machine.controls(threads)
        times = _measure(model, kv, step, repeats or step.repeats)
        again = machine.controls(threads)
        read = max(control.read_gb_s, again.read_gb_s)
        multiply = max(control.bf16_gflop_s, again.bf16_gflop_s)
        results.append((times, _floor_s(model, step, read * 1e9, multiply * 1e9)))
    return results


@torch.inference_mode()
def _measure(model: Model, kv: KVPool, step: Step, repeats: int) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    each = -(-step.context // PAGE_SIZE)
    tables = torch.randperm(kv.pages, generator=generator)[: step.requests * each].view(step.requests, each)
    batch = AttentionBatch(
        [step.query] * step.requests, [step.context] * step.requests, tables.tolist(), PAGE_SIZE
    )
    vocab = model.config.vocab_size
    tokens = torch.randint(vocab, (step.requests * step.query,), generator=generator)
    positions = torch.arange(step.context - step.query, step.context).repeat(step.requests)
    last = torch.arange(1, step.requests + 1) * step.query - 1
    times = []
    for _ in range(repeats + 1):  # the first one pays for memory
        start = perf_counter()
        plan = model.kernels.plan(batch, model.device)
        model.forward(tokens, positions, kv.tensor, plan, None, last)
        times.append(perf_counter() - start)
    return times[1:]


def _floor_s(model: Model, step: Step, read_s: float, multiply_s: float) -> float:
    config = model.config
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer = config.hidden_size * (2 * q + 2 * kv + 3 * config.intermediate_size)
    head = config.hidden_size * config.vocab_size
    weight_bytes = 2 * (config.layers * layer + head)
    if isinstance(model.forward_pass, NativePass):
        weight_bytes = model.forward_pass.weight_bytes
    tokens = step.requests * step.query
    cached = step.requests * (step.context - step.query)
    seen = step.query * (step.context - step.query) + step.query * (step.query + 1) / 2
    bytes_read = weight_bytes + 2 * cached * config.layers * 2 * kv
    products = tokens * config.layers * layer + step.requests * (head + config.layers * 2 * q * seen)
    return max(bytes_read / read_s, 2 * products / multiply_s)
