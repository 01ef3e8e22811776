"""The decoder that Llama and its relatives share: tokens in, logits out, KV in pages."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kernels.base import Kernels, Plan
from workers.models.config import ModelConfig
from workers.models.rope import cos_sin_cache
from workers.models.weights import WeightLoader


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer. q, k and v are one matrix, and so are gate and up."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention_out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Model:
    """A model ready to run. A family is a subclass that says what sets it apart."""

    has_qkv_bias: ClassVar[bool] = False
    has_qk_norm: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, weights: WeightLoader, kernels: Kernels) -> None:
        """Take the weights out of the loader. Raises ModelError if they do not fit the config."""
        self.config = config
        self.kernels = kernels
        self.dtype = weights.dtype
        self.device = weights.device
        self._embedding = weights.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [self._take_layer(weights, i) for i in range(config.layers)]
        self._final_norm = weights.take("model.norm.weight", config.hidden_size)
        if config.tied_embeddings:
            weights.skip("lm_head.weight")  # some files store the copy
            self._head = self._embedding
        else:
            self._head = weights.take("lm_head.weight", *self._embedding.shape)
        divisors = weights.take_optional("rope_freqs.weight", config.head_dim // 2)
        weights.check_all_taken()
        self._cos_sin = cos_sin_cache(
            config.rope, config.head_dim, config.context_length_tokens, divisors
        ).to(self.device)

    def _take_layer(self, weights: WeightLoader, index: int) -> Layer:
        config, prefix = self.config, f"model.layers.{index}."
        hidden, intermediate = config.hidden_size, config.intermediate_size
        qkv = [f"{prefix}self_attn.{name}_proj." for name in "qkv"]
        qkv_rows = [config.heads * config.head_dim] + [config.kv_heads * config.head_dim] * 2
        gate_up = [f"{prefix}mlp.{name}_proj.weight" for name in ("gate", "up")]
        bias, norm = self.has_qkv_bias, self.has_qk_norm
        return Layer(
            attention_norm=weights.take(f"{prefix}input_layernorm.weight", hidden),
            qkv=weights.take_stacked([f"{name}weight" for name in qkv], qkv_rows, hidden),
            qkv_bias=weights.take_stacked([f"{name}bias" for name in qkv], qkv_rows) if bias else None,
            q_norm=weights.take(f"{prefix}self_attn.q_norm.weight", config.head_dim) if norm else None,
            k_norm=weights.take(f"{prefix}self_attn.k_norm.weight", config.head_dim) if norm else None,
            attention_out=weights.take(f"{prefix}self_attn.o_proj.weight", hidden, qkv_rows[0]),
            mlp_norm=weights.take(f"{prefix}post_attention_layernorm.weight", hidden),
            gate_up=weights.take_stacked(gate_up, [intermediate] * 2, hidden),
            down=weights.take(f"{prefix}mlp.down_proj.weight", hidden, intermediate),
        )

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv: Tensor,
        plan: Plan,
        on_layer: Callable[[int], None] | None,
        logit_rows: Tensor,
    ) -> Tensor:
        """One step over all requests of `plan`.

        Args:
            tokens: int64 `[T]`, the new tokens of all requests, one request after the other.
            positions: int64 `[T]`, each token's position in its request.
            kv: the pool `[layers, pages, 2, page_size, kv_heads, head_dim]` in the model's dtype.
            plan: `kernels.plan` of the same batch.
            on_layer: called with i as soon as layer i is done and its KV of this step is in `kv`. On a
                GPU that means queued on the current stream.
            logit_rows: int64 `[R]`, the rows of `tokens` whose logits are wanted; may be empty.

        Returns:
            float32 `[R, vocab]`.
        """
        kernels, eps = self.kernels, self.config.rms_norm_eps
        residual = kernels.embedding(tokens, self._embedding)
        x = kernels.rms_norm(residual, self._layers[0].attention_norm, eps)
        next_norms = [layer.attention_norm for layer in self._layers[1:]] + [self._final_norm]
        for i, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            x = self._attend(layer, x, positions, kv[i], plan, self.config.layer_windows_tokens[i])
            x, residual = kernels.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = kernels.linear(kernels.silu_and_mul(kernels.linear(x, layer.gate_up)), layer.down)
            x, residual = kernels.add_rms_norm(x, residual, next_norm, eps)
            if on_layer is not None:
                on_layer(i)
        return kernels.logits(x[logit_rows], self._head)

    def _attend(
        self, layer: Layer, x: Tensor, positions: Tensor, layer_kv: Tensor, plan: Plan, window: int | None
    ) -> Tensor:
        kernels, config = self.kernels, self.config
        qkv = kernels.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, config.head_dim)
        q, k, v = torch.split(qkv, [config.heads, config.kv_heads, config.kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = kernels.rms_norm(q, layer.q_norm, config.rms_norm_eps)
            k = kernels.rms_norm(k, layer.k_norm, config.rms_norm_eps)
        q, k = kernels.rope(q, k, positions, self._cos_sin)
        kernels.append(k, v, layer_kv, plan)
        attended = kernels.attention(q, layer_kv, plan, scale=config.head_dim**-0.5, sliding_window=window)
        return kernels.linear(attended.reshape(len(x), -1), layer.attention_out)
