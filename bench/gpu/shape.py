"""Models that exist only as a shape: random weights, to measure with."""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.decoder import Decoder, Layer
from workers.models.rope import RopeConfig, cos_sin_cache

SCALE = 0.02


class Shape(NamedTuple):
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context_tokens: int

    @property
    def kv_token_bytes(self) -> int:
        """In bfloat16, over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 2

    @property
    def weights(self) -> int:
        """How many take part in a product for each token: all but the embedding."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.vocab * self.hidden

    def prefill_flop(self, tokens: int) -> float:
        """Of a whole prompt, logits of its last token only."""
        products = 2.0 * (self.weights - self.vocab * self.hidden) * tokens
        return products + 2.0 * tokens**2 * self.heads * self.head_dim * self.layers

    def pool(self, pages: int, page_size: int) -> tuple[int, int, int, int, int, int]:
        return (self.layers, pages, 2, page_size, self.kv_heads, self.head_dim)


LLAMA_8B = Shape(32, 4096, 14336, 32, 8, 128, 128_256, 32_768)
TINY = Shape(2, 256, 512, 4, 2, 64, 1024, 4_096)


def of(device: torch.device) -> Shape:
    return LLAMA_8B if device.type == "cuda" else TINY


def random_tensor(*shape: int, device: torch.device) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device=device).normal_(0.0, SCALE)


def decoder(shape: Shape, device: torch.device) -> Decoder:
    def weight(*sizes: int) -> Tensor:
        return random_tensor(*sizes, device=device)

    def norm() -> Tensor:
        return torch.ones(shape.hidden, dtype=torch.bfloat16, device=device)

    qkv_rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    layers = (
        Layer(
            attention_norm=norm(),
            qkv=weight(qkv_rows, shape.hidden),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            attention_out=weight(shape.hidden, shape.heads * shape.head_dim),
            mlp_norm=norm(),
            gate_up=weight(2 * shape.intermediate, shape.hidden),
            down=weight(shape.hidden, shape.intermediate),
            window_tokens=None,
        )
        for _ in range(shape.layers)
    )
    return Decoder(
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.intermediate,
        1e-5,
        weight(shape.vocab, shape.hidden),
        layers,
        norm(),
        weight(shape.vocab, shape.hidden),
        cos_sin_cache(RopeConfig(500_000.0), shape.head_dim, shape.context_tokens).to(device),
    )


def write(shape: Shape, folder: Path, device: torch.device) -> None:
    """A Hugging Face directory that kvrelay serves: config, weights, and a tokenizer of a few words."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"w{i}": i for i in range(shape.vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w0"}))
    tensors = {
        name: (torch.ones(sizes) if len(sizes) == 1 else random_tensor(*sizes, device=device))
        .to(torch.bfloat16)
        .cpu()
        for name, sizes in tensor_sizes(shape).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def tensor_sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = {
        "input_layernorm": (shape.hidden,),
        "self_attn.q_proj": (q, shape.hidden),
        "self_attn.k_proj": (kv, shape.hidden),
        "self_attn.v_proj": (kv, shape.hidden),
        "self_attn.o_proj": (shape.hidden, q),
        "post_attention_layernorm": (shape.hidden,),
        "mlp.gate_proj": (shape.intermediate, shape.hidden),
        "mlp.up_proj": (shape.intermediate, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.intermediate),
    }
    ends = {"model.embed_tokens": (shape.vocab, shape.hidden), "model.norm": (shape.hidden,)}
    ends["lm_head"] = (shape.vocab, shape.hidden)
    sizes = {f"model.layers.{i}.{name}": size for i in range(shape.layers) for name, size in layer.items()}
    return {f"{name}.weight": size for name, size in (ends | sizes).items()}
