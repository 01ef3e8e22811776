"""The modules that are compiled ahead are those that FlashInfer asks for. Its own wrappers plan and run on
the meta device; what they load is noted, and computes nothing."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kernels import load_kernels
from kernels.base import AttentionBatch, NotCompiled
from workers.engine.batch_draw import Draw, draw_rows

flashinfer = pytest.importorskip("flashinfer")

from flashinfer import activation, decode, norm, page, prefill, rope, sampling  # noqa: E402
from flashinfer.jit import core  # noqa: E402

from bench.gpu import modules  # noqa: E402
from kernels import flashinfer_attention  # noqa: E402
from kernels.flashinfer import TOP_P_VOCAB, FlashInferKernels  # noqa: E402
from kernels.flashinfer_attention import GraphPlan  # noqa: E402

META = torch.device("meta")
PAGE_SIZE, PAGES = 16, 40
DECODES = AttentionBatch([1, 1, 1], [5, 16, 33], [[3], [4], [5, 6, 7]], PAGE_SIZE)
MIXED = AttentionBatch([1, 20, 7], [5, 36, 7], [[3], [4, 8, 9], [5, 6]], PAGE_SIZE)
LOADERS = (
    activation.get_act_and_mul_module,
    decode.get_batch_decode_module,
    norm.get_norm_module,
    page.get_page_module,
    prefill.get_batch_prefill_module,
    rope.get_rope_module,
    sampling.get_sampling_module,
)


class Module:
    """Has every function; each does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: [0] * 16


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What takes itself for a GPU, and pins no memory."""
    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(sampling, "_get_row_states_buffer", lambda *_: None)
    monkeypatch.setattr(core.current_compilation_context, "TARGET_CUDA_ARCHS", {modules.HOPPER})
    monkeypatch.setattr(flashinfer_attention, "on_hopper", lambda _: True)
    monkeypatch.setattr(norm, "_USE_CUDA_NORM", True)
    for owner in (activation, decode, norm, page, prefill, rope, sampling):
        for name, answer in (("get_compute_capability", (9, 0)), ("device_support_pdl", True)):
            monkeypatch.setattr(owner, name, lambda *_, answer=answer: answer, raising=False)
    for loader in LOADERS:
        loader.cache_clear()
    yield
    for loader in LOADERS:
        loader.cache_clear()


@pytest.fixture
def asked(hopper: None, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the modules that were loaded."""
    names: set[str] = set()

    def load(spec: Any) -> Module:
        names.add(spec.name)
        return Module()

    monkeypatch.setattr(core.JitSpec, "build_and_load", load)
    return names


def attend(heads: int, kv_heads: int, head_dim: int, **options: Any) -> None:
    """All that a layer asks for, in steps of decodes, in others, and for a graph."""
    kernels = FlashInferKernels()
    layer_kv = torch.empty(PAGES, 2, PAGE_SIZE, kv_heads, head_dim, dtype=torch.bfloat16, device=META)
    graphed = GraphPlan(3, torch.zeros(96, dtype=torch.int32, device=META), torch.empty(1 << 20, device=META))
    graphed.load(DECODES)
    plans = [(DECODES, graphed)] + [(batch, kernels.plan(batch, META)) for batch in (DECODES, MIXED)]
    for batch, plan in plans:
        q, k, v = (
            torch.empty(batch.tokens, each, head_dim, dtype=torch.bfloat16, device=META)
            for each in (heads, kv_heads, kv_heads)
        )
        positions = torch.empty(batch.tokens, dtype=torch.int64, device=META)
        kernels.rope(q, k, positions, torch.empty(64, head_dim, device=META))
        kernels.append(k, v, layer_kv, plan)
        x = kernels.attention(q, layer_kv, plan, scale=head_dim**-0.5, **options).flatten(1)
        assert x.shape == (batch.tokens, heads * head_dim)
        weight = x.new_empty(x.shape[1])
        kernels.add_rms_norm(kernels.rms_norm(x, weight, 1e-5), x, weight, 1e-5)
        kernels.silu_and_mul(x)


def test_what_is_compiled_ahead_is_what_is_asked_for(asked: set[str]) -> None:
    attend(9, 3, 64)  # SmolLM2 135M
    attend(32, 8, 64)
    attend(32, 8, 128)  # Llama 3 8B
    attend(4, 4, 128)
    attend(6, 2, 64, sliding_window=20)
    attend(6, 2, 64, logit_soft_cap=1.5)
    attend(32, 8, 128, sliding_window=4096)  # Mistral 7B
    scores = torch.empty(1, TOP_P_VOCAB, device=META)
    draw_rows(FlashInferKernels(), scores, torch.empty(1, device=META), [Draw(0.7, 5, 0.9, 0.0, 0.3)])
    assert asked == {spec.name for spec in modules.specs()}


@pytest.mark.parametrize(("batch", "kind"), [(DECODES, "decode"), (MIXED, "prefill")])
def test_without_a_compiler_the_missing_module_is_named(
    hopper: None, batch: AttentionBatch, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    kernels = FlashInferKernels()
    layer_kv = torch.empty(PAGES, 2, PAGE_SIZE, 2, 256, dtype=torch.float16, device=META)
    q = torch.empty(batch.tokens, 2, 256, dtype=torch.float16, device=META)
    with pytest.raises(NotCompiled, match=f"batch_{kind}.*_f16_.*_256_.* KERNELS=reference"):
        kernels.attention(q, layer_kv, kernels.plan(batch, META), scale=1.0)


def test_norms_are_those_that_can_be_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHINFER_USE_CUDA_NORM", raising=False)
    load_kernels("flashinfer", "cuda")
    assert os.environ["FLASHINFER_USE_CUDA_NORM"] == "1"


def test_few_tokens_are_filtered_in_plain_torch(asked: set[str]) -> None:
    """The search that FlashInfer has for them takes the share of one, not of the row's sum."""
    weights = torch.tensor([[3.0, 2.0, 1.0, 0.5]])
    kept = FlashInferKernels().top_p(weights, torch.tensor([0.7], dtype=torch.float64))
    assert (kept > 0).tolist() == [[True, True, False, False]]
    assert not asked


@pytest.mark.parametrize(("cores", "gigabytes", "jobs"), [(2, 24, 2), (64, 24, 6), (4, 2, 1)])
def test_compilers_fit_into_the_memory(cores: int, gigabytes: int, jobs: int) -> None:
    assert modules.jobs(cores, gigabytes << 30) == jobs
