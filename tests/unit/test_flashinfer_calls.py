"""FlashInfer is called as its signatures say, with shapes that fit. Nothing is computed: tensors are on the
meta device, and FlashInfer's functions are replaced by ones that bind their arguments and return the shape.
"""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.base import AttentionBatch
from kernels.decoder import Decoder, Layer

flashinfer = pytest.importorskip("flashinfer")

from kernels.flashinfer import TOP_P_VOCAB, FlashInferKernels  # noqa: E402
from kernels.flashinfer_attention import Attention, GraphPlan, Variant  # noqa: E402
from kernels.page_tables import PageTables  # noqa: E402
from workers.engine.batch_draw import Draw, draw_rows  # noqa: E402

META = torch.device("meta")
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB, PAGE_SIZE, PAGES = 6, 2, 64, 48, 100, 16, 40
DECODES = AttentionBatch([1, 1, 1], [5, 16, 33], [[3], [4], [5, 6, 7]], PAGE_SIZE)
MIXED = AttentionBatch([1, 20, 7], [5, 36, 7], [[3], [4, 8, 9], [5, 6]], PAGE_SIZE)


class Calls:
    """Replaces functions by ones that note their bound arguments and return what `shape_of` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bound: dict[str, list[dict[str, Any]]] = {}
        self._monkeypatch = monkeypatch

    def replace(self, owner: Any, name: str, result: Callable[[dict[str, Any]], Any]) -> None:
        signature = inspect.signature(getattr(owner, name))
        key = f"{getattr(owner, '__name__', owner)}.{name}"

        def called(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            self.bound.setdefault(key, []).append(arguments)
            return result(arguments)

        self._monkeypatch.setattr(owner, name, called)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls(monkeypatch)
    for wrapper in (
        flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        flashinfer.BatchPrefillWithPagedKVCacheWrapper,
    ):
        # `plan` hands its options on as they are, so the function behind it is the one to bind to.
        plan = "_plan_impl" if hasattr(wrapper, "_plan_impl") else "plan"
        calls.replace(wrapper, "__init__", lambda _: None)
        calls.replace(wrapper, plan, lambda _: None)
        calls.replace(wrapper, "run", _attended)
    calls.replace(flashinfer, "append_paged_kv_cache", _appended)
    calls.replace(flashinfer, "rmsnorm", lambda a: torch.empty_like(a["input"]))
    calls.replace(flashinfer, "fused_add_rmsnorm", lambda _: None)
    calls.replace(flashinfer, "apply_rope_with_cos_sin_cache_inplace", _rotated)
    calls.replace(flashinfer, "top_k_mask_logits", _filtered("logits", "top_k"))
    calls.replace(flashinfer, "top_p_renorm_probs", _filtered("probs", "top_p"))
    calls.replace(flashinfer, "silu_and_mul", lambda a: a["input"].chunk(2, dim=-1)[0])
    return calls


def _attended(arguments: dict[str, Any]) -> Tensor:
    q, layer_kv = arguments["q"], arguments["paged_kv_cache"]
    assert q.shape[1:] == (HEADS, HEAD_DIM)
    assert q.stride(-1) == 1
    assert layer_kv.shape == (PAGES, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    return torch.empty(q.shape, dtype=q.dtype, device=META)


def _appended(arguments: dict[str, Any]) -> None:
    tokens = len(arguments["append_key"])
    assert arguments["append_key"].shape == arguments["append_value"].shape == (tokens, KV_HEADS, HEAD_DIM)
    for name in ("batch_indices", "positions"):
        assert arguments[name].shape == (tokens,)
        assert arguments[name].dtype == torch.int32
    assert len(arguments["kv_indptr"]) == len(arguments["kv_last_page_len"]) + 1
    assert arguments["kv_layout"] == "NHD"


def _rotated(arguments: dict[str, Any]) -> None:
    tokens = len(arguments["positions"])
    assert arguments["query"].shape == (tokens, HEADS * HEAD_DIM)
    assert arguments["key"].shape == (tokens, KV_HEADS * HEAD_DIM)
    for name in ("query", "key"):
        # A copy would be rotated in place of the projection it was made from.
        assert arguments[name]._is_view(), f"{name} must be rotated where it is"
    assert arguments["cos_sin_cache"].dtype == torch.float32


def _filtered(values: str, limits: str) -> Callable[[dict[str, Any]], Tensor]:
    def result(arguments: dict[str, Any]) -> Tensor:
        rows, limit = arguments[values], arguments[limits]
        assert rows.dtype == torch.float32
        assert rows.is_contiguous()
        assert limit.shape == rows.shape[:1]
        assert limit.dtype == {"top_k": torch.int32, "top_p": torch.float32}[limits]
        return torch.empty_like(rows)

    return result


def decoder(windows: tuple[int | None, ...]) -> Decoder:
    def weight(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device=META)

    embedding = weight(VOCAB, HIDDEN)
    layers = [
        Layer(
            attention_norm=weight(HIDDEN),
            qkv=weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
            qkv_bias=None,
            q_norm=weight(HEAD_DIM) if window else None,
            k_norm=weight(HEAD_DIM) if window else None,
            attention_out=weight(HIDDEN, HEADS * HEAD_DIM),
            mlp_norm=weight(HIDDEN),
            gate_up=weight(64, HIDDEN),
            down=weight(HIDDEN, 32),
            window_tokens=window,
        )
        for window in windows
    ]
    cos_sin = torch.empty(512, HEAD_DIM, device=META)
    return Decoder(
        HEADS, KV_HEADS, HEAD_DIM, 32, 1e-5, embedding, iter(layers), weight(HIDDEN), embedding, cos_sin
    )


def run(kernels: FlashInferKernels, plan: Any, tokens: int, windows: tuple[int | None, ...]) -> Tensor:
    ids = torch.empty(tokens, dtype=torch.int64, device=META)
    kv = torch.empty(len(windows), PAGES, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=META)
    return kernels.compile(decoder(windows))(ids, ids, kv, plan, None, ids[:2])


@pytest.mark.parametrize("batch", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_a_pass_binds_every_call(calls: Calls, batch: AttentionBatch) -> None:
    kernels = FlashInferKernels()
    logits = run(kernels, kernels.plan(batch, META), batch.tokens, (None, 8, None, 8))
    assert logits.shape == (2, VOCAB)
    assert logits.dtype == torch.float32
    kind = "Decode" if batch is DECODES else "Prefill"
    plans = [each for name, each in calls.bound.items() if kind in name and "plan" in name]
    assert [plan["window_left"] for plan in plans[0]] == [-1, 7], "planned once per window, not per layer"
    assert all(plan["page_size"] == PAGE_SIZE for plan in plans[0])
    for plan in plans[0]:
        assert not any(
            value.device.type == "meta"
            for key, value in plan.items()
            if isinstance(value, Tensor) and "indices" not in key
        ), "lengths must be on the host: reading them from the device would wait for it"


def test_the_next_step_plans_again(calls: Calls) -> None:
    kernels = FlashInferKernels()
    for _ in range(2):
        run(kernels, kernels.plan(DECODES, META), 3, (None, None))
    (plans,) = [each for name, each in calls.bound.items() if "Decode" in name and "plan" in name]
    (made,) = [each for name, each in calls.bound.items() if "Decode" in name and "init" in name]
    assert (len(made), len(plans)) == (1, 2)


def test_a_graph_plan_keeps_its_memory(calls: Calls) -> None:
    kernels = FlashInferKernels()
    pages = torch.zeros(3 * 32, dtype=torch.int32, device=META)
    plan = GraphPlan(3, pages, torch.empty(16, dtype=torch.uint8, device=META))
    tables = plan.tables
    for _ in range(2):
        plan.load(DECODES)
        run(kernels, plan, 3, (None, 8))
    assert plan.tables is tables
    (made,) = [each for name, each in calls.bound.items() if "Decode" in name and "init" in name]
    assert len(made) == 2  # one per window
    for each in made:
        assert each["use_cuda_graph"]
        assert each["paged_kv_indices_buffer"] is pages
        assert each["paged_kv_indptr_buffer"] is tables.page_starts
        assert each["paged_kv_last_page_len_buffer"] is tables.last_page_tokens
    (plans,) = [each for name, each in calls.bound.items() if "Decode" in name and "plan" in name]
    assert len(plans) == 4


@pytest.mark.parametrize("head_dim", [24, 80, 96])
def test_other_head_sizes_never_reach_flashinfer(calls: Calls, head_dim: int) -> None:
    kernels = FlashInferKernels()
    plan = kernels.plan(MIXED, META)
    q, k = (
        torch.empty(MIXED.tokens, heads, head_dim, dtype=torch.bfloat16, device=META)
        for heads in (HEADS, KV_HEADS)
    )
    layer_kv = torch.empty(PAGES, 2, PAGE_SIZE, KV_HEADS, head_dim, dtype=torch.bfloat16, device=META)
    cos_sin = torch.empty(64, head_dim, device=META)
    q, k = kernels.rope(q, k, torch.empty(MIXED.tokens, dtype=torch.int64, device=META), cos_sin)
    kernels.append(k, k, layer_kv, plan)
    assert kernels.attention(q, layer_kv, plan, scale=1.0).shape == q.shape
    assert calls.bound == {}


def test_flash_attention_3_is_for_what_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    plain = Variant(32, 8, 128, 16, torch.bfloat16, 1.0, None, None)
    cuda = torch.device("cuda", 0)
    assert plain.backend(cuda) == "fa3"
    for other in (plain._replace(head_dim=64), plain._replace(window=9), plain._replace(soft_cap=2.0)):
        assert other.backend(cuda) == "fa2"


def test_groups_of_four_decode_on_tensor_cores() -> None:
    variant = Variant(32, 8, 128, 16, torch.bfloat16, 1.0, None, None)
    assert variant.tensor_cores
    assert not variant._replace(heads=24).tensor_cores
    assert variant.backend(META) == "fa2"


def test_the_filters_of_a_draw_are_bound(calls: Calls) -> None:
    """Of FlashInfer's sampling only these: its draws would not follow from seed and position."""
    kernels = FlashInferKernels()
    given = [Draw(0.7, 5, 0.9, 0.0, 0.3), Draw(1.0, 0, 1.0, 0.1, 0.6)]
    scores = torch.empty(2, TOP_P_VOCAB, device=META)
    ids = draw_rows(kernels, scores, torch.empty(2, device=META), given)
    assert (ids.shape, ids.dtype) == ((2,), torch.int64)
    (top_k,) = calls.bound["flashinfer.top_k_mask_logits"]
    (top_p,) = calls.bound["flashinfer.top_p_renorm_probs"]
    assert top_k["logits"] is scores
    assert top_p["is_deterministic"]


def test_a_plan_waits_until_the_device_has_taken_the_last(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps overlap, and FlashInfer copies every plan from one piece of host memory."""
    done: list[str] = []

    def event() -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: done.append("wait"), record=lambda: done.append("record"))

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(Attention, "_plan", lambda *_: done.append("plan"))
    workspace = SimpleNamespace(is_cuda=True, device=META)
    variant = Variant(HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, torch.bfloat16, 1.0, None, None)
    attention = Attention(variant, workspace, decode=True)  # type: ignore[arg-type]
    for _ in range(2):
        attention.plan(PageTables.of(DECODES), PageTables.of(DECODES))
    assert done == ["wait", "plan", "record"] * 2
