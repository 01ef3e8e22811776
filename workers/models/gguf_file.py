"""Weights of a GGUF file: dequantized as they are read, or in the bits of the file."""

import re
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from kernels.quantized_matrix import QuantizedMatrix
from relay.gguf import read_gguf_head
from relay.model_file import ModelError
from workers.models.config import ModelConfig
from workers.models.gguf_blocks import quantized_matrix

_QUANTIZATIONS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")

_PLAIN = ("F32", "F16", "BF16")

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs": "rope_freqs",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFWeights:
    """See `WeightSource`. Raises ModelError if the file is cut short or uses an unknown quantization."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        head = read_gguf_head(path)
        self._bytes = np.memmap(path, mode="r")
        self._tensors = {_hf_name(name): tensor for name, tensor in head.tensors.items()}
        # Files of this architecture store q and k for a rotation of neighbours instead of halves.
        self._rotated_heads = (
            {"q_proj": config.heads, "k_proj": config.kv_heads} if head.architecture == "llama" else {}
        )
        if unknown := {_kind_name(tensor.kind) for tensor in head.tensors.values()} - set(_QUANTIZATIONS):
            raise ModelError(
                f"{path} is quantized as {', '.join(sorted(unknown))}, known are: {', '.join(_QUANTIZATIONS)}"
            )
        needed = max((t.offset + _size_bytes(t.shape, t.kind) for t in head.tensors.values()), default=0)
        if needed > len(self._bytes):
            raise ModelError(
                f"{path} is cut short: {len(self._bytes)} of {needed} bytes are there, download it again"
            )

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def kind(self, name: str) -> str:
        return _kind_name(self._tensors[name].kind)

    def read(self, name: str) -> Tensor:
        shape, kind, _ = self._tensors[name]
        raw = self._raw(name)
        if kind == gguf.GGMLQuantizationType.BF16:
            tensor = torch.from_numpy(raw.copy()).view(torch.bfloat16).view(shape)
        else:
            values = gguf.quants.dequantize(raw.view(_item_type(kind)), gguf.GGMLQuantizationType(kind))
            tensor = torch.from_numpy(np.require(values, requirements="W")).view(shape)
        return self._unrotated(name, tensor)

    def read_quantized(self, name: str) -> QuantizedMatrix | None:
        (outputs, *_), kind, _ = self._tensors[name]
        if _kind_name(kind) in _PLAIN:
            return None
        blocks = torch.from_numpy(self._raw(name).copy()).view(outputs, -1)
        matrix = quantized_matrix(blocks, kind)
        if matrix is None:
            return QuantizedMatrix.quantize(self.read(name), bits=8)
        codes, scales, minimums = matrix
        return QuantizedMatrix(
            self._unrotated(name, codes),
            self._unrotated(name, scales),
            None if minimums is None else self._unrotated(name, minimums),
        )

    def _raw(self, name: str) -> np.ndarray:
        shape, kind, offset = self._tensors[name]
        return self._bytes[offset : offset + _size_bytes(shape, kind)]

    def _unrotated(self, name: str, tensor: Tensor) -> Tensor:
        module = name.rsplit(".", 2)[-2]
        return _halves(tensor, self._rotated_heads[module]) if module in self._rotated_heads else tensor


def _hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; one that is not known keeps its name."""
    if layer := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        index, module, kind = layer.groups()
        return f"model.layers.{index}.{_LAYER_NAMES.get(module, module)}.{kind}"
    module, _, kind = name.rpartition(".")
    return f"{_NAMES.get(module, module)}.{kind}"


def _kind_name(kind: int) -> str:
    try:
        return gguf.GGMLQuantizationType(kind).name
    except ValueError:
        return f"type {kind}"


def _size_bytes(shape: tuple[int, ...], kind: int) -> int:
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    return int(np.prod(shape)) // block_values * block_bytes


def _item_type(kind: int) -> type[np.generic]:
    plain: dict[int, type[np.generic]] = {
        gguf.GGMLQuantizationType.F32: np.float32,
        gguf.GGMLQuantizationType.F16: np.float16,
    }
    return plain.get(kind, np.uint8)


def _halves(tensor: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head from (0, d/2, 1, d/2 + 1, …) to (0, 1, …)."""
    return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
