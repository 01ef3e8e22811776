"""What a gateway tells about a model without loading it."""

import os
from pathlib import Path
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
    """Describe the model at `path`. Raises ModelError if it is no language model."""
    path = resolve_model(path)
    if path.is_dir():
        config = read_json(path / "config.json")
        context, vocab_size = config.get("max_position_embeddings"), config.get("vocab_size")
    else:
        head = read_gguf_head(path)
        embedding = head.tensors.get("token_embd.weight")
        context, vocab_size = head.get("context_length"), embedding.shape[0] if embedding else None
    if context is None or vocab_size is None:
        raise ModelError(f"{path} states no context length or vocabulary size: is it a language model?")
    return ModelCard(served_name(path), read_architecture(path), context, vocab_size, fingerprint(path))


def read_architecture(path: Path) -> str:
    """The kind of model, as its file spells it: "LlamaForCausalLM" in config.json, "llama" in GGUF."""
    if path.is_file():
        return read_gguf_head(path).architecture
    names = read_json(path / "config.json").get("architectures")
    if not names:
        raise ModelError(f"{path / 'config.json'} names no architecture: is it a language model?")
    return str(names[0])
