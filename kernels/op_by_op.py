"""A forward pass that calls one operation after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from kernels.decoder import Decoder, Layer, ends_group
from kernels.quantized_matrix import dense

if TYPE_CHECKING:
    from kernels.base import Kernels, Plan


class OpByOp:
    """See `kernels.decoder.ForwardPass`, of dense matrices. For kernels that offer nothing faster."""

    def __init__(self, kernels: Kernels, decoder: Decoder) -> None:
        self._kernels = kernels
        self._decoder = decoder
        self._embedding = dense(decoder.embedding, decoder.dtype)
        self._head = dense(decoder.head, decoder.dtype)
        self._layers = list(decoder.layers)

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
        kernels, eps = self._kernels, self._decoder.rms_norm_eps
        residual = kernels.embedding(tokens, self._embedding)
        x = kernels.rms_norm(residual, self._layers[0].attention_norm, eps)
        next_norms = [layer.attention_norm for layer in self._layers[1:]] + [self._decoder.final_norm]
        for i, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            x = self._attend(layer, x, positions, kv[i], plan)
            x, residual = kernels.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = kernels.linear(kernels.silu_and_mul(kernels.linear(x, layer.gate_up)), layer.down)
            x, residual = kernels.add_rms_norm(x, residual, next_norm, eps)
            if on_layer is not None and ends_group(i, group_layers, len(self._layers)):
                on_layer(i)
        return kernels.logits(x[logit_rows], self._head)

    def _attend(self, layer: Layer, x: Tensor, positions: Tensor, layer_kv: Tensor, plan: Plan) -> Tensor:
        kernels, decoder = self._kernels, self._decoder
        qkv = kernels.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, decoder.head_dim)
        q, k, v = qkv.split([decoder.heads, decoder.kv_heads, decoder.kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = kernels.rms_norm(q, layer.q_norm, decoder.rms_norm_eps)
            k = kernels.rms_norm(k, layer.k_norm, decoder.rms_norm_eps)
        q, k = kernels.rope(q, k, positions, decoder.cos_sin)
        kernels.append(k, v, layer_kv, plan)
        attended = kernels.attention(
            q, layer_kv, plan, scale=decoder.head_dim**-0.5, sliding_window=layer.window_tokens
        )
        return kernels.linear(attended.reshape(len(x), -1), layer.attention_out)
