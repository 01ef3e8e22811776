"""Models: configuration, weights and the forward pass."""

from workers.models.config import ModelConfig
from workers.models.model import Model
from workers.models.registry import load_model

__all__ = ["Model", "ModelConfig", "load_model"]
