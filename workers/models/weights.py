"""A model's tensors, by their Hugging Face names, whatever file they come from."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from relay.model_file import ModelError
from workers.models.config import ModelConfig


class WeightSource(Protocol):
    """An open weight file. Tensors are read one by one, so that a model is never held twice."""

    def names(self) -> frozenset[str]: ...

    def read(self, name: str) -> Tensor:
        """The tensor called `name`, on the CPU, in the file's dtype (float32 where it was quantized).

        Raises ModelError if it cannot be read.
        """
        ...


def open_weights(path: Path, config: ModelConfig) -> WeightSource:
    """Open the weights of the model at `path`, a GGUF file or a Hugging Face directory."""
    if path.is_dir():
        from workers.models.safetensors_file import SafetensorsWeights

        return SafetensorsWeights(path)
    from workers.models.gguf_file import GGUFWeights

    return GGUFWeights(path, config)


class WeightLoader:
    """Takes tensors out of a source, checks their shapes, and puts them on a device in one dtype."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
        self.source = source
        self.dtype = dtype
        self.device = device
        self._names = source.names()
        self._taken: set[str] = set()

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor called `name`. Raises ModelError if it is missing or has another shape."""
        return self.take_stacked([name], [shape[0]], *shape[1:])

    def take_stacked(self, names: Sequence[str], rows: Sequence[int], *row_shape: int) -> Tensor:
        """Several tensors of `[rows[i], *row_shape]`, one below the other, as one."""
        stacked = torch.empty(sum(rows), *row_shape, dtype=self.dtype, device=self.device)
        for name, part in zip(names, torch.split(stacked, list(rows)), strict=True):
            part.copy_(self._read(name, part.shape))
        return stacked

    def take_optional(self, name: str, *shape: int) -> Tensor | None:
        return self.take(name, *shape) if name in self._names else None

    def skip(self, name: str) -> None:
        """Leave a tensor, which may not even be there, in the file."""
        self._taken.add(name)

    def check_all_taken(self) -> None:
        """Raise ModelError if the file holds tensors nobody took: it is another kind of model."""
        if left := sorted(self._names - self._taken):
            shown = ", ".join(left[:4]) + (", …" if len(left) > 4 else "")
            raise ModelError(f"the model has {len(left)} tensors that its architecture does not use: {shown}")

    def _read(self, name: str, shape: torch.Size) -> Tensor:
        if name not in self._names:
            raise ModelError(f"the model lacks the tensor {name}: download or convert it again")
        tensor = self.source.read(name)
        if tensor.shape != shape:
            raise ModelError(
                f"the tensor {name} has shape {list(tensor.shape)}, its config says {list(shape)}: "
                "weights and config are of different models"
            )
        self._taken.add(name)
        return tensor
