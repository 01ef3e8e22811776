"""Weights of a Hugging Face directory: one or several safetensors files."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from relay.model_file import ModelError, weight_files

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_DERIVED = ("rotary_emb.inv_freq", "masked_bias")  # saved by old versions, computed here


class SafetensorsWeights:
    """See `WeightSource`. Raises ModelError if a file is missing or cut short."""

    def __init__(self, path: Path) -> None:
        self._file_of: dict[str, Any] = {}
        for file in weight_files(path):
            try:
                opened: Any = safe_open(file, framework="pt")
            except SafetensorError as error:
                raise ModelError(f"{file} is damaged or cut short ({error}): download it again") from error
            names = [name for name in opened.keys() if not name.endswith(_DERIVED)]  # noqa: SIM118 - no dict
            self._file_of.update(dict.fromkeys(names, opened))

    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def kind(self, name: str) -> str:
        return str(self._file_of[name].get_slice(name).get_dtype())

    def read_quantized(self, name: str) -> None:
        return None

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)
        if tensor.dtype not in _FLOATS:
            raise ModelError(
                f"the tensor {name} is quantized ({tensor.dtype}): use a model in bfloat16 or a GGUF file"
            )
        return tensor
