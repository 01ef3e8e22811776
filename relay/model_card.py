"""What a gateway tells about a model without loading it."""

import os
from typing import NamedTuple

from relay.gguf import read_gguf_head
from relay.model_file import ModelError, fingerprint, read_json, resolve_model, served_name


class ModelCard(NamedTuple):
    """What the gateway needs to know of a model, read without its weights."""

    name: str
    architecture: str
    context_length_tokens: int
    vocab_size: int
    fingerprint: str


def read_model_card(path: str | os.PathLike[str]) -> ModelCard:
    """Describe the model at `path`. Raises ModelError if it is no model."""
    path = resolve_model(path)
    name = served_name(path)
    if path.is_dir():
        config = read_json(path / "config.json")
        try:
            architecture = config["architectures"][0]
            context, vocab = config["max_position_embeddings"], config["vocab_size"]
        except (KeyError, IndexError, TypeError) as error:
            raise ModelError(f"{path / 'config.json'} lacks {error}: is it a language model?") from error
    else:
        head = read_gguf_head(path)
        if "token_embd.weight" not in head.tensors:
            raise ModelError(f"{path} has no tensor token_embd.weight: is it a language model?")
        architecture, context = head.architecture, head.get("context_length")
        vocab = head.tensors["token_embd.weight"].shape[0]
        if context is None:
            raise ModelError(f"{path} lacks the key {architecture}.context_length: convert the model again")
    return ModelCard(name, architecture, context, vocab, fingerprint(path))
