"""A model's tensors, by their Hugging Face names, whatever file they come from."""

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kernels.quantized_matrix import GROUP, Matrix, QuantizedMatrix
from relay.log import event
from relay.model_file import ModelError
from workers.models.config import ModelConfig

FORMS = ("file", "dtype", "int8", "int4")
_BITS = {"int8": 8, "int4": 4}

log = logging.getLogger(__name__)


class WeightSource(Protocol):
    """An open weight file. Tensors are read one by one, so that a model is never held twice."""

    def names(self) -> frozenset[str]: ...

    def read(self, name: str) -> Tensor:
        """The tensor called `name`, on the CPU, in the file's dtype (float32 where it was quantized).

        Raises ModelError if it cannot be read.
        """
        ...

    def read_quantized(self, name: str) -> QuantizedMatrix | None:
        """The same in few bits, as the file has it or nearly so; None if it is not quantized."""
        ...

    def kind(self, name: str) -> str:
        """What the file calls the type of a tensor's values."""
        ...


def open_weights(path: Path, config: ModelConfig) -> WeightSource:
    """Open the weights of the model at `path`, a GGUF file or a Hugging Face directory."""
    if path.is_dir():
        from workers.models.safetensors_file import SafetensorsWeights

        return SafetensorsWeights(path)
    from workers.models.gguf_file import GGUFWeights

    return GGUFWeights(path, config)


class WeightLoader:
    """Takes tensors out of a source, checks their shapes, and puts them on a device in one dtype.

    Matrices come in a form: of the file ("file"), in the dtype ("dtype"), or quantized ("int8", "int4").
    """

    def __init__(
        self, source: WeightSource, dtype: torch.dtype, device: torch.device, form: str = "dtype"
    ) -> None:
        assert form in FORMS
        self.source = source
        self.dtype = dtype
        self.device = device
        self._form = form
        self._held: Counter[tuple[str, str]] = Counter()
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
            self._held[self.source.kind(name), _name(self.dtype)] += 1
        return stacked

    def take_matrix(
        self, names: Sequence[str], rows: Sequence[int], columns: int, least_bits: int = 4
    ) -> Matrix:
        """Several matrices `[rows[i], columns]`, one below the other, as one in this loader's form.

        One that has no few bits, or columns that are not whole groups, puts all into the dtype.
        """
        if self._form == "dtype" or columns % GROUP:
            return self.take_stacked(names, rows, columns)
        parts: list[QuantizedMatrix] = []
        for name, outputs in zip(names, rows, strict=True):
            part = self._quantized(name, torch.Size((outputs, columns)), least_bits)
            if part is None:
                return self.take_stacked(names, rows, columns)
            parts.append(part)
        whole = QuantizedMatrix.stack(parts)
        self._held.update((self.source.kind(name), f"int{whole.bits}") for name in names)
        return whole

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

    def log_held(self) -> None:
        """What became of the tensors of each kind."""
        for (kind, held), tensors in sorted(self._held.items()):
            event(log, "weights_held", kind=kind, held_as=held, tensors=tensors)

    def _quantized(self, name: str, shape: torch.Size, least_bits: int) -> QuantizedMatrix | None:
        if self._form != "file":
            bits = max(least_bits, _BITS[self._form])
            return QuantizedMatrix.quantize(self._read(name, shape), bits)
        self._check(name)
        matrix = self.source.read_quantized(name)
        if matrix is not None:
            self._took(name, matrix.shape, shape)
        return matrix

    def _read(self, name: str, shape: torch.Size) -> Tensor:
        self._check(name)
        tensor = self.source.read(name)
        self._took(name, tensor.shape, shape)
        return tensor

    def _check(self, name: str) -> None:
        if name not in self._names:
            raise ModelError(f"the model lacks the tensor {name}: download or convert it again")

    def _took(self, name: str, found: torch.Size, shape: torch.Size) -> None:
        if found != shape:
            raise ModelError(
                f"the tensor {name} has shape {list(found)}, its config says {list(shape)}: "
                "weights and config are of different models"
            )
        self._taken.add(name)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
