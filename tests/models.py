"""Models for tests: small random ones of every family, and the default model as transformers runs it."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GgufConfig,
    PreTrainedModel,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from relay.model_file import default_model_path

VOCAB_SIZE = 131  # odd on purpose
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def random_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A small float32 model of `family` ("llama", "mistral", "qwen2", "qwen3"), every weight random."""
    config = AutoConfig.for_model(family, **_SHAPE | overrides)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Also what transformers starts at zero or one: biases and norms must matter.
            weight.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model


def save_directory(model: PreTrainedModel, path: Path, max_shard_size: str = "1GB") -> Path:
    """Save as a Hugging Face directory of safetensors."""
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return path


def save_gguf(model: PreTrainedModel, path: Path, metadata: dict[str, float | str] | None = None) -> Path:
    """Save as a float32 GGUF file, laid out as llama.cpp's converter does.

    `metadata` adds keys of the architecture. Frequencies of llama3 scaling become a tensor.
    """
    config = model.config
    architecture = "llama" if config.model_type == "mistral" else config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    for key, value in (metadata or {}).items():
        if isinstance(value, str):
            writer.add_string(f"{architecture}.{key}", value)
        else:
            writer.add_float32(f"{architecture}.{key}", value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight.numpy()
        if architecture == "llama" and ".q_proj." in name:
            values = _interleave(values, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            values = _interleave(values, config.num_key_value_heads)
        there = names.get_name(name, (".weight", ".bias"))
        assert there, name
        writer.add_tensor(there, values)
    if config.rope_parameters["rope_type"] == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
        plain = config.rope_parameters["rope_theta"] ** -(
            torch.arange(0, head_dim(config), 2) / head_dim(config)
        )
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
    write_out(writer)
    return path


def write_out(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


@lru_cache(maxsize=1)
def default_model_in_transformers() -> Any:
    """The default model, dequantized to float32. Loaded once; do not change it."""
    path = default_model_path()
    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    return model.eval()


def _interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """Per head, put row i of the first half before row i of the second."""
    per_head = values.reshape(heads, values.shape[0] // heads, -1)
    first, second = np.split(per_head, 2, axis=1)
    return np.stack((first, second), axis=2).reshape(values.shape)
