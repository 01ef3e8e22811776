"""Qwen3, dense."""

from workers.models.model import Model


class Qwen3(Model):
    """Each head of q and k is normalized before it is rotated."""

    has_qk_norm = True
