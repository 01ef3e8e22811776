"""Qwen2 and Qwen2.5."""

from workers.models.model import Model


class Qwen2(Model):
    """Its q, k and v projections have biases."""

    has_qkv_bias = True
