"""FlashInfer's kernels for NVIDIA GPUs, decode steps under CUDA graphs.

bfloat16 and float16 run on FlashInfer, attention for heads of 64, 128 and 256; the rest as in the reference.
Of FlashInfer's sampling only the filters are used: its draws consume a generator's state, and a token must
follow from the request's seed and position alone.
"""

import flashinfer
import torch
from torch import Tensor

from kernels.base import AttentionBatch
from kernels.cuda_graphs import GraphedPass, graph_rows
from kernels.decoder import Decoder, ForwardPass
from kernels.flashinfer_attention import DTYPES, HEAD_DIMS, GraphPlan, Plan, Variant, Wrappers, supports
from kernels.reference import ReferenceKernels

TOP_P_VOCAB = 2048  # for fewer tokens FlashInfer has another search, which takes weights to add up to one


class FlashInferKernels(ReferenceKernels):
    """See `kernels.base.Kernels`. One thread runs them, one step at a time: a plan lasts until the next."""

    name = "flashinfer"

    def __init__(self) -> None:
        self._of_device: dict[torch.device, Wrappers] = {}

    def compile(self, decoder: Decoder) -> ForwardPass:
        if not (decoder.final_norm.is_cuda and supports(decoder.dtype, decoder.head_dim)):
            return super().compile(decoder)
        workspace = self._wrappers(decoder.final_norm.device).workspace
        return GraphedPass(self, decoder, lambda rows, pages: GraphPlan(rows, pages, workspace))

    def warm_rows(self, max_rows: int) -> list[int]:
        return graph_rows(max_rows)[::-1]  # the largest first: the others fit into its memory

    def plan(self, batch: AttentionBatch, device: torch.device) -> Plan:
        batch.check()
        return Plan(batch, device, self._wrappers(device))

    def append(self, k: Tensor, v: Tensor, layer_kv: Tensor, plan: Plan | GraphPlan) -> None:
        if not supports(k.dtype, k.shape[-1]):
            assert isinstance(plan, Plan)
            super().append(k, v, layer_kv, plan.reference)
            return
        tables = plan.tables
        flashinfer.append_paged_kv_cache(
            k,
            v,
            tables.token_requests,
            tables.token_positions,
            layer_kv,
            tables.pages,
            tables.page_starts,
            tables.last_page_tokens,
            kv_layout="NHD",
        )

    def attention(
        self,
        q: Tensor,
        layer_kv: Tensor,
        plan: Plan | GraphPlan,
        *,
        scale: float,
        sliding_window: int | None = None,
        logit_soft_cap: float | None = None,
    ) -> Tensor:
        _, _, page_size, kv_heads, head_dim = layer_kv.shape
        if not supports(q.dtype, head_dim):
            assert isinstance(plan, Plan)
            return super().attention(
                q,
                layer_kv,
                plan.reference,
                scale=scale,
                sliding_window=sliding_window,
                logit_soft_cap=logit_soft_cap,
            )
        assert q.dtype == layer_kv.dtype
        variant = Variant(
            q.shape[1], kv_heads, head_dim, page_size, q.dtype, scale, sliding_window, logit_soft_cap
        )
        return plan.attention(variant).run(q, layer_kv)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype not in DTYPES:
            return super().rms_norm(x, weight, eps)
        normed: Tensor = flashinfer.rmsnorm(x, weight, eps)
        return normed

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if x.dtype not in DTYPES:
            return super().add_rms_norm(x, residual, weight, eps)
        flashinfer.fused_add_rmsnorm(x, residual, weight, eps)
        return x, residual

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
        if q.dtype not in DTYPES or q.shape[-1] not in HEAD_DIMS:
            return super().rope(q, k, positions, cos_sin_cache)
        flashinfer.apply_rope_with_cos_sin_cache_inplace(
            positions, q.flatten(1), k.flatten(1), q.shape[-1], cos_sin_cache, is_neox=True
        )
        return q, k

    def silu_and_mul(self, x: Tensor) -> Tensor:
        if x.dtype not in DTYPES:
            return super().silu_and_mul(x)
        gated: Tensor = flashinfer.silu_and_mul(x)
        return gated

    def top_k(self, scores: Tensor, k: Tensor) -> Tensor:
        # It selects by a radix, comparing values and adding nothing.
        kept: Tensor = flashinfer.top_k_mask_logits(scores, k)
        return kept

    def top_p(self, weights: Tensor, p: Tensor) -> Tensor:
        if weights.shape[1] < TOP_P_VOCAB:
            return super().top_p(weights, p)
        # It counts with the row's own sum, so the weights need not add up to one; its floating point sums
        # depend on the order in which blocks come, those of integers do not.
        kept: Tensor = flashinfer.top_p_renorm_probs(weights, p.float(), is_deterministic=True)
        return kept

    def _wrappers(self, device: torch.device) -> Wrappers:
        if device not in self._of_device:
            self._of_device[device] = Wrappers(device)
        return self._of_device[device]
