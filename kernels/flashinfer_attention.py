"""FlashInfer's attention wrappers: planned once a step, run once a layer."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import flashinfer
import torch
from flashinfer.jit.core import MissingJITCacheError
from torch import Tensor

from kernels.base import AttentionBatch, NotCompiled
from kernels.page_tables import PageTables
from kernels.reference import Plan as ReferencePlan
from kernels.reference import ReferenceKernels

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
WORKSPACE_BYTES = 256 << 20
_HOPPER = (9, 0)
_FA3_HEAD_DIM = 128
_GROUP_FOR_TENSOR_CORES = 4  # query heads per KV head from which they pay in decode


def on_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == _HOPPER


def supports(dtype: torch.dtype, head_dim: int) -> bool:
    return dtype in DTYPES and head_dim in HEAD_DIMS


class Variant(NamedTuple):
    """What FlashInfer compiles and plans for; layers that share it share a plan."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    scale: float
    window: int | None
    soft_cap: float | None

    @property
    def tensor_cores(self) -> bool:
        """Whether decode should use them."""
        return self.heads // self.kv_heads >= _GROUP_FOR_TENSOR_CORES

    def backend(self, device: torch.device) -> str:
        """Of prefill: FlashAttention 3 on Hopper for heads of 128, as large models have them, in its plain
        form. The others would be minutes of compiling for little."""
        plain = self.window is None and self.soft_cap is None and self.head_dim == _FA3_HEAD_DIM
        return "fa3" if plain and on_hopper(device) else "fa2"

    @property
    def options(self) -> dict[str, Any]:
        """The keywords that both kinds of `plan` take. A window does not count the token itself there."""
        return {
            "sm_scale": self.scale,
            "window_left": -1 if self.window is None else self.window - 1,
            "logits_soft_cap": self.soft_cap,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
        }


class Attention:
    """One attention over the pages of one batch: a FlashInfer wrapper that may be planned again and again."""

    def __init__(
        self,
        variant: Variant,
        workspace: Tensor,
        decode: bool,
        fixed: PageTables | None = None,
    ) -> None:
        """With `fixed` tables (decode only) it keeps reading those, as a CUDA graph must."""
        self._variant = variant
        self._decode = decode
        self._planned = torch.cuda.Event() if workspace.is_cuda else None
        if not decode:
            assert fixed is None
            self._wrapper: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace, "NHD", backend=variant.backend(workspace.device)
            )
            return
        buffers: Mapping[str, Any] = {}
        if fixed is not None:
            buffers = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": fixed.page_starts,
                "paged_kv_indices_buffer": fixed.pages,
                "paged_kv_last_page_len_buffer": fixed.last_page_tokens,
            }
        self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=variant.tensor_cores, backend="fa2", **buffers
        )

    def plan(self, host: PageTables, there: PageTables) -> None:
        """`host` and `there` are the same tables on both sides: lengths are read here, pages there.

        Raises NotCompiled where FLASHINFER_DISABLE_JIT is set, as in images, and its module is missing."""
        if self._planned is not None:
            # FlashInfer copies each plan from the same host memory: the device must have taken the last one,
            # which it does at the start of that step.
            self._planned.synchronize()
        try:
            self._plan(host, there)
        except MissingJITCacheError as missing:
            name = missing.spec.name if missing.spec is not None else "for this model"
            raise NotCompiled(
                f"FlashInfer's module {name} was not compiled ahead: set KERNELS=reference, or add it to "
                "bench/gpu/modules.py and build again"
            ) from missing
        if self._planned is not None:
            self._planned.record()

    def _plan(self, host: PageTables, there: PageTables) -> None:
        variant = self._variant
        shape = (variant.heads, variant.kv_heads, variant.head_dim, variant.page_size)
        tables = (host.page_starts, there.pages, host.last_page_tokens)
        if self._decode:
            self._wrapper.plan(*tables, *shape, **variant.options)
        else:
            self._wrapper.plan(host.query_starts, *tables, *shape, causal=True, **variant.options)

    def run(self, q: Tensor, layer_kv: Tensor) -> Tensor:
        out: Tensor = self._wrapper.run(q, layer_kv)
        return out


class Wrappers:
    """The wrappers of all steps, over one workspace. A step with nothing but decodes has wrappers of its own;
    one prefill wrapper serves any other, decodes among prefills too."""

    def __init__(self, device: torch.device) -> None:
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._attentions: dict[tuple[Variant, bool], Attention] = {}
        self._planned: dict[tuple[Variant, bool], Plan] = {}

    def planned(self, variant: Variant, plan: "Plan") -> Attention:
        key = (variant, plan.batch.decodes_only)
        if key not in self._attentions:
            self._attentions[key] = Attention(variant, self.workspace, decode=plan.batch.decodes_only)
        if self._planned.get(key) is not plan:
            self._attentions[key].plan(plan.host, plan.tables)
            self._planned[key] = plan
        return self._attentions[key]


class Plan:
    """Of one step. Attention is planned when the first layer of each variant asks for it."""

    def __init__(self, batch: AttentionBatch, device: torch.device, wrappers: Wrappers) -> None:
        self.batch = batch
        self._device = device
        self._wrappers = wrappers

    @cached_property
    def host(self) -> PageTables:
        return PageTables.of(self.batch, pinned=self._device.type == "cuda")

    @cached_property
    def tables(self) -> PageTables:
        return self.host.to(self._device)

    @cached_property
    def reference(self) -> ReferencePlan:
        return ReferenceKernels().plan(self.batch, self._device)

    def attention(self, variant: Variant) -> Attention:
        return self._wrappers.planned(variant, self)


class GraphPlan:
    """Of any decode step of `rows` requests: `load` writes it into what a CUDA graph goes on reading."""

    def __init__(self, rows: int, pages: Tensor, workspace: Tensor) -> None:
        """`pages` int32: as many as `rows` contexts can fill; graphs may share it."""
        device = pages.device

        def counting(count: int) -> Tensor:
            return torch.arange(count, dtype=torch.int32, device=device)

        self.tables = PageTables(
            counting(rows + 1), counting(rows + 1), counting(rows), pages, counting(rows), counting(rows)
        )
        self._workspace = workspace
        self._attentions: dict[Variant, Attention] = {}

    def load(self, batch: AttentionBatch) -> None:
        self._host = PageTables.of(batch, pinned=self.tables.pages.is_cuda)
        self._there = self._host.to(self.tables.pages.device)
        for table, new in zip(self.tables, self._there, strict=True):
            table[: len(new)].copy_(new)
        for attention in self._attentions.values():
            attention.plan(self._host, self._there)

    def attention(self, variant: Variant) -> Attention:
        if variant not in self._attentions:
            self._attentions[variant] = Attention(variant, self._workspace, decode=True, fixed=self.tables)
            self._attentions[variant].plan(self._host, self._there)
        return self._attentions[variant]
