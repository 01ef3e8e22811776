"""The decoder that Llama and its relatives share: tokens in, logits out, KV in pages."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from kernels.base import Kernels, Plan
from kernels.decoder import Decoder, Layer
from workers.models.config import ModelConfig
from workers.models.rope import cos_sin_cache
from workers.models.weights import WeightLoader


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
        ends = ([config.vocab_size], config.hidden_size)  # in four bits they would cost more than they save
        embedding = weights.take_matrix(["model.embed_tokens.weight"], *ends, least_bits=8)
        final_norm = weights.take("model.norm.weight", config.hidden_size)
        if config.tied_embeddings:
            weights.skip("lm_head.weight")  # some files store the copy
            head = embedding
        else:
            head = weights.take_matrix(["lm_head.weight"], *ends, least_bits=8)
        divisors = weights.take_optional("rope_freqs.weight", config.head_dim // 2)
        cos_sin = cos_sin_cache(config.rope, config.head_dim, config.context_length_tokens, divisors)
        decoder = Decoder(
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            rms_norm_eps=config.rms_norm_eps,
            embedding=embedding,
            layers=(self._take_layer(weights, i) for i in range(config.layers)),
            final_norm=final_norm,
            head=head,
            cos_sin=cos_sin.to(self.device),
        )
        self.forward_pass = kernels.compile(decoder)
        weights.check_all_taken()
        weights.log_held()

    def _take_layer(self, weights: WeightLoader, index: int) -> Layer:
        config, prefix = self.config, f"model.layers.{index}."
        hidden, intermediate = config.hidden_size, config.intermediate_size
        qkv = [f"{prefix}self_attn.{name}_proj." for name in "qkv"]
        qkv_rows = [config.heads * config.head_dim] + [config.kv_heads * config.head_dim] * 2
        gate_up = [f"{prefix}mlp.{name}_proj.weight" for name in ("gate", "up")]
        bias, norm = self.has_qkv_bias, self.has_qk_norm
        return Layer(
            attention_norm=weights.take(f"{prefix}input_layernorm.weight", hidden),
            qkv=weights.take_matrix([f"{name}weight" for name in qkv], qkv_rows, hidden),
            qkv_bias=weights.take_stacked([f"{name}bias" for name in qkv], qkv_rows) if bias else None,
            q_norm=weights.take(f"{prefix}self_attn.q_norm.weight", config.head_dim) if norm else None,
            k_norm=weights.take(f"{prefix}self_attn.k_norm.weight", config.head_dim) if norm else None,
            attention_out=weights.take_matrix([f"{prefix}self_attn.o_proj.weight"], [hidden], qkv_rows[0]),
            mlp_norm=weights.take(f"{prefix}post_attention_layernorm.weight", hidden),
            gate_up=weights.take_matrix(gate_up, [intermediate] * 2, hidden),
            down=weights.take_matrix([f"{prefix}mlp.down_proj.weight"], [hidden], intermediate),
            window_tokens=config.layer_windows_tokens[index],
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
        group_layers: int = 1,
    ) -> Tensor:
        """One step over all requests of `plan`.

        Args:
            tokens: int64 `[T]`, the new tokens of all requests, one request after the other.
            positions: int64 `[T]`, each token's position in its request.
            kv: the pool `[layers, pages, 2, page_size, kv_heads, head_dim]` in the model's dtype.
            plan: `kernels.plan` of the same batch.
            on_layer: called with i as soon as layer i is done and its KV of this step is in `kv`, for the
                last of every `group_layers` layers and of all. On a GPU that means queued on the current
                stream.
            logit_rows: int64 `[R]`, the rows of `tokens` whose logits are wanted; may be empty.

        Returns:
            float32 `[R, vocab]`.
        """
        return self.forward_pass(tokens, positions, kv, plan, on_layer, logit_rows, group_layers)
