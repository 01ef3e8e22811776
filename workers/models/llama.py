"""Llama 2 and 3, SmolLM2, and Mistral, whose sliding window comes with the config."""

from workers.models.model import Model


class Llama(Model):
    """The plain decoder."""
