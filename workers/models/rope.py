"""Rotary position embedding: its parameters, and the table of cosines and sines that kernels read."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from relay.gguf import GGUFHead
from relay.model_file import ModelError

_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Base and scaling of the rotation. A field that a kind does not use keeps its default."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_context_tokens: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Multiplies cosines and sines, so attention scores by its square (yarn)."""

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ModelError(f"rope scaling {self.kind!r} is not supported, known are: {', '.join(_KINDS)}")

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "RopeConfig":
        """Read `rope_parameters`, or `rope_theta` and `rope_scaling` of older files."""
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
            raise ModelError("a partial rotary embedding is not supported: use another model")
        factor = scaling.get("factor")
        original = scaling.get("original_max_position_embeddings") or config["max_position_embeddings"]
        if factor is None:
            factor = config["max_position_embeddings"] / original
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        return cls(
            theta=scaling.get("rope_theta") or config.get("rope_theta") or 10_000.0,
            kind=kind,
            factor=factor,
            original_context_tokens=original,
            low_freq_factor=scaling.get("low_freq_factor", 1.0),
            high_freq_factor=scaling.get("high_freq_factor", 4.0),
            beta_fast=scaling.get("beta_fast") or 32.0,
            beta_slow=scaling.get("beta_slow") or 1.0,
            truncate=scaling.get("truncate", True),
            attention_factor=_hf_attention_factor(scaling, factor) if kind == "yarn" else 1.0,
        )

    @classmethod
    def from_gguf(cls, head: GGUFHead) -> "RopeConfig":
        """Read the `rope.*` keys. The frequencies of llama3 scaling are a tensor, `rope_freqs.weight`."""
        kind = head.get("rope.scaling.type", "none")
        factor = head.get("rope.scaling.factor", 1.0)
        yarn = kind == "yarn"
        return cls(
            theta=head.get("rope.freq_base", 10_000.0),
            kind="default" if kind == "none" else kind,
            factor=factor,
            original_context_tokens=head.get(
                "rope.scaling.original_context_length", head.get("context_length")
            ),
            beta_fast=head.get("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=head.get("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=head.get("rope.scaling.attn_factor", 1.0) * _yarn_scale(factor) if yarn else 1.0,
        )


def cos_sin_cache(
    rope: RopeConfig, head_dim: int, positions: int, frequency_divisors: Tensor | None = None
) -> Tensor:
    """float32 `[positions, head_dim]`: cosines in the first half of each row, sines in the second.

    `frequency_divisors` `[head_dim / 2]` is what a GGUF file keeps in `rope_freqs.weight`.
    """
    frequencies = inverse_frequencies(rope, head_dim)
    if frequency_divisors is not None:
        frequencies = frequencies / frequency_divisors.float()
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """float32 `[head_dim / 2]`: radians per position of each pair."""
    plain = rope.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim)
    return plain


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, and those between interpolated."""
    turns = rope.original_context_tokens * plain / (2 * math.pi)  # within the original context
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * plain + (1 - kept) * plain / rope.factor


def _yarn(rope: RopeConfig, plain: Tensor, head_dim: int) -> Tensor:
    """YaRN, https://arxiv.org/abs/2309.00071 §3.2: a ramp over pairs between kept and slowed."""

    def pair_with(turns: float) -> float:
        ratio = rope.original_context_tokens / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    slowed = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    slowed = slowed.clamp(0, 1)
    return slowed * plain / rope.factor + (1 - slowed) * plain


def _yarn_scale(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _hf_attention_factor(scaling: dict[str, Any], factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all:
        return _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all)
    return _yarn_scale(factor)
