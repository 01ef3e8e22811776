"""A weight matrix in few bits, as it crosses from a model file to the kernels."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

GROUP = 32  # values of a row that share a scale
BITS = (4, 8)


class QuantizedMatrix(NamedTuple):
    """A matrix `[out, in]` whose values are `code * scale + minimum`, by groups of 32 along a row.

    With 8 bits a code is a signed byte and there is no minimum. With 4 bits a group is 16 bytes, as in GGUF:
    byte i holds value i in its low half and value 16 + i in its high half.
    """

    codes: Tensor  # int8 [out, in], or uint8 [out, in / 2]
    scales: Tensor  # float16 [out, in / 32]
    minimums: Tensor | None  # float16 [out, in / 32] with 4 bits

    @property
    def bits(self) -> int:
        return 8 if self.minimums is None else 4

    @property
    def shape(self) -> torch.Size:
        outputs, groups = self.scales.shape
        return torch.Size((outputs, groups * GROUP))

    @classmethod
    def quantize(cls, values: Tensor, bits: int) -> "QuantizedMatrix":
        """Round `values` `[out, in]`: with 8 bits in 127 steps to the largest of a group, with 4 in 15 steps
        from its lowest to its highest. `in` is a multiple of 32."""
        assert bits in BITS
        outputs, inputs = values.shape
        assert inputs % GROUP == 0
        groups = values.float().view(outputs, -1, GROUP)
        if bits == 8:
            scales = (groups.abs().amax(-1) / 127).half()
            return cls(_codes(groups, scales, -127, 127).to(torch.int8).view(outputs, inputs), scales, None)
        minimums = groups.amin(-1).half()
        from_minimum = groups - minimums.float().unsqueeze(-1)
        scales = (from_minimum.amax(-1) / 15).half()
        codes = _codes(from_minimum, scales, 0, 15).to(torch.uint8)
        low, high = codes.split(GROUP // 2, -1)
        return cls((low | high << 4).view(outputs, -1), scales, minimums)

    @classmethod
    def stack(cls, parts: Sequence["QuantizedMatrix"]) -> "QuantizedMatrix":
        """One below the other. Where some have 8 bits, those of 4 are quantized again, which costs up to a
        254th of a group's largest value."""
        if any(part.bits != parts[0].bits for part in parts):
            parts = [part if part.bits == 8 else cls.quantize(part.dense(torch.float32), 8) for part in parts]
        codes, scales, minimums = zip(*parts, strict=True)
        return cls(torch.cat(codes), torch.cat(scales), None if minimums[0] is None else torch.cat(minimums))

    def dense(self, dtype: torch.dtype) -> Tensor:
        """All values, `[out, in]`."""
        outputs, groups = self.scales.shape
        scales = self.scales.float().unsqueeze(-1)
        if self.minimums is None:
            return (self.codes.view(outputs, groups, GROUP) * scales).to(dtype).view(self.shape)
        codes = self.codes.view(outputs, groups, GROUP // 2)
        values = torch.cat((codes & 15, codes >> 4), -1) * scales + self.minimums.float().unsqueeze(-1)
        return values.to(dtype).view(self.shape)


Matrix: TypeAlias = Tensor | QuantizedMatrix


def dense(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """A matrix as a tensor; one that is a tensor is left as it is."""
    return matrix.dense(dtype) if isinstance(matrix, QuantizedMatrix) else matrix


def _codes(values: Tensor, scales: Tensor, low: int, high: int) -> Tensor:
    """Of float16 scales, because those are what the codes will meet. A scale of zero gives zero."""
    wide = scales.float().unsqueeze(-1)
    return (values / wide).nan_to_num_(0, 0, 0).round_().clamp_(low, high)
