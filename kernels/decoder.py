"""The decoder that Llama and its relatives share, as kernels get it, and the pass they make of it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.quantized_matrix import Matrix, dense


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer. q, k and v are one matrix, and so are gate and up."""

    attention_norm: Tensor
    qkv: Matrix
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention_out: Matrix
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix
    window_tokens: int | None
    """How many tokens a token sees, itself included; None for all."""

    def dense(self, dtype: torch.dtype) -> "Layer":
        return replace(
            self,
            qkv=dense(self.qkv, dtype),
            attention_out=dense(self.attention_out, dtype),
            gate_up=dense(self.gate_up, dtype),
            down=dense(self.down, dtype),
        )


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model's shape and weights, all of one dtype but `cos_sin` and what is quantized.

    `layers` can be iterated once and reads each layer then, so that who repacks them never holds all twice.
    """

    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    embedding: Matrix  # [vocab, hidden]
    layers: Iterable[Layer]
    final_norm: Tensor
    head: Matrix  # [vocab, hidden]; the embedding itself where they are tied
    cos_sin: Tensor  # float32 [positions, head_dim]

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and KV, and of the weights that are not quantized."""
        return self.final_norm.dtype

    @property
    def tied(self) -> bool:
        return self.head is self.embedding

    def dense(self) -> "Decoder":
        """The same with every matrix in `dtype`."""
        embedding = dense(self.embedding, self.dtype)
        return replace(
            self,
            embedding=embedding,
            layers=(layer.dense(self.dtype) for layer in self.layers),
            head=embedding if self.tied else dense(self.head, self.dtype),
        )


def ends_group(layer: int, group_layers: int, layers: int) -> bool:
    """Whether it is the last of `group_layers` layers, or of all."""
    return (layer + 1) % group_layers == 0 or layer + 1 == layers


class ForwardPass(Protocol):
    """One step over all requests of a plan."""

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv: Tensor,
        plan: Any,
        on_layer: Callable[[int], None] | None,
        logit_rows: Tensor,
        group_layers: int = 1,
    ) -> Tensor:
        """As `workers.models.Model.forward`; `plan` is of the same kernels."""
        ...
