"""The decoder that Llama and its relatives share, as kernels get it, and the pass they make of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


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
    window_tokens: int | None
    """How many tokens a token sees, itself included; None for all."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model's shape and weights, all of one dtype but `cos_sin`.

    `layers` can be iterated once and reads each layer then, so that who repacks them never holds all twice.
    """

    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    embedding: Tensor  # [vocab, hidden]
    layers: Iterator[Layer]
    final_norm: Tensor
    head: Tensor  # [vocab, hidden]; the embedding itself where they are tied
    cos_sin: Tensor  # float32 [positions, head_dim]


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
    ) -> Tensor:
        """As `workers.models.Model.forward`; `plan` is of the same kernels."""
        ...
