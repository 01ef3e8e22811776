"""A model's shape, from a Hugging Face `config.json` or from GGUF metadata."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relay.gguf import GGUFHead, read_gguf_head
from relay.model_file import ModelError, read_json, resolve_model
from workers.models.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`architecture` is spelled as in the file: "LlamaForCausalLM" in config.json, "llama" in GGUF."""

    architecture: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length_tokens: int
    rms_norm_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    layer_windows_tokens: tuple[int | None, ...]
    """Per layer: how many tokens a token sees, itself included; None for all."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ModelError(
                f"{self.heads} heads cannot share {self.kv_heads} KV heads: the config is broken"
            )

    @classmethod
    def load(cls, path: Path) -> "ModelConfig":
        """Read the config of the model at `path`. Raises ModelError that names what is missing or unknown."""
        path = resolve_model(path)
        try:
            if path.is_dir():
                return cls.from_hf(read_json(path / "config.json"))
            return cls.from_gguf(read_gguf_head(path))
        except KeyError as error:
            raise ModelError(
                f"the config of {path} lacks {error}: convert or download the model again"
            ) from error

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "ModelConfig":
        for key in ("attention_bias", "mlp_bias"):
            if config.get(key):
                raise ModelError(f"models with {key} are not supported: use one without")
        if config.get("hidden_act", "silu") != "silu":
            raise ModelError(f"activation {config['hidden_act']!r} is not supported, only silu")
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return cls(
            architecture=config["architectures"][0],
            layers=config["num_hidden_layers"],
            hidden_size=hidden,
            intermediate_size=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            vocab_size=config["vocab_size"],
            context_length_tokens=config["max_position_embeddings"],
            rms_norm_eps=config["rms_norm_eps"],
            rope=RopeConfig.from_hf(config),
            tied_embeddings=config.get("tie_word_embeddings", False),
            layer_windows_tokens=_hf_windows(config),
        )

    @classmethod
    def from_gguf(cls, head: GGUFHead) -> "ModelConfig":
        def need(key: str) -> Any:
            return head.metadata[f"{head.architecture}.{key}"]

        def uniform(key: str) -> int:
            value = need(key)
            values = set(value) if isinstance(value, list) else {value}
            if len(values) > 1:
                raise ModelError(f"layers that differ in {key} are not supported: use another model")
            return int(values.pop())

        layers, hidden, heads = need("block_count"), need("embedding_length"), uniform("attention.head_count")
        grouped = f"{head.architecture}.attention.head_count_kv" in head.metadata
        return cls(
            architecture=head.architecture,
            layers=layers,
            hidden_size=hidden,
            intermediate_size=uniform("feed_forward_length"),
            heads=heads,
            kv_heads=uniform("attention.head_count_kv") if grouped else heads,
            head_dim=head.get("attention.key_length") or head.get("rope.dimension_count") or hidden // heads,
            vocab_size=head.tensors["token_embd.weight"].shape[0],
            context_length_tokens=need("context_length"),
            rms_norm_eps=need("attention.layer_norm_rms_epsilon"),
            rope=RopeConfig.from_gguf(head),
            tied_embeddings="output.weight" not in head.tensors,
            layer_windows_tokens=(head.get("attention.sliding_window") or None,) * layers,
        )

    def kv_shape(self, pages: int, page_size: int) -> tuple[int, int, int, int, int, int]:
        """The shape of a KV pool of this model."""
        return (self.layers, pages, 2, page_size, self.kv_heads, self.head_dim)


def _hf_windows(config: dict[str, Any]) -> tuple[int | None, ...]:
    """Sliding windows per layer: by `layer_types` where given, else as each family defines its own keys."""
    layers: int = config["num_hidden_layers"]
    window: int | None = config.get("sliding_window")
    # Mistral's window is on wherever it is set; Qwen states one even where its switch is off.
    has_switch = config.get("model_type") != "mistral"
    if window is None or (has_switch and not config.get("use_sliding_window")):
        return (None,) * layers
    if types := config.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    full_layers = config["max_window_layers"] if has_switch else 0
    return tuple(window if layer >= full_layers else None for layer in range(layers))
