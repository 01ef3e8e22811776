"""Blocks of quantized GGUF tensors as the kernels take them.

Layout of the blocks: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from collections.abc import Callable

import gguf
import torch
from torch import Tensor

from kernels.quantized_matrix import GROUP, QuantizedMatrix

_Kind = gguf.GGMLQuantizationType


def quantized_matrix(blocks: Tensor, kind: int) -> QuantizedMatrix | None:
    """The tensor of `kind` whose rows are `blocks`, uint8 `[out, bytes]`; None if a kind has no such form.

    Exact, but for what float16 costs Q4_K: a 2,048th of each scale and minimum.
    """
    if kind not in _READERS:
        return None
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[_Kind(kind)]
    outputs, row_bytes = blocks.shape
    inputs = row_bytes // block_bytes * block_values
    codes, scales, minimums = _READERS[kind](blocks.view(outputs, -1, block_bytes))
    groups = (outputs, inputs // GROUP)
    return QuantizedMatrix(
        codes.reshape(outputs, -1),
        scales.reshape(groups),
        None if minimums is None else minimums.reshape(groups),
    )


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


_Parts = tuple[Tensor, Tensor, Tensor | None]


def _q8_0(blocks: Tensor) -> _Parts:
    return blocks[..., 2:].view(torch.int8), _half(blocks, 0), None


def _q4_0(blocks: Tensor) -> _Parts:
    scales = _half(blocks, 0)
    return blocks[..., 2:], scales, scales * -8


def _q4_1(blocks: Tensor) -> _Parts:
    return blocks[..., 4:], _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Tensor) -> _Parts:
    """Five bits, the highest of each value apart: they fit a byte."""
    places = torch.arange(8, dtype=torch.uint8)
    highest = (blocks[..., 2:6].unsqueeze(-1) >> places & 1).flatten(-2)
    codes = torch.cat((blocks[..., 6:] & 15, blocks[..., 6:] >> 4), -1) | highest << 4
    return codes.to(torch.int8) - 16, _half(blocks, 0), None


def _q4_k(blocks: Tensor) -> _Parts:
    """Eight groups of 32, whose scales and minimums are six bits of a scale of the block.

    Those of the first four groups lie in bytes 0 to 3 and 4 to 7. Those of the others have their low four
    bits in bytes 8 to 11, and their high two bits above those of the first.
    """
    packed = blocks[..., 4:16]
    first, second, third = packed.split(4, -1)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    minimums = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    # 32 bytes hold two groups, one in their low halves and one in their high halves.
    pairs = blocks[..., 16:].unflatten(-1, (4, 1, 32))
    groups = torch.cat((pairs & 15, pairs >> 4), -2)
    low, high = groups.split(GROUP // 2, -1)
    scale, minimum = _half(blocks, 0).float(), _half(blocks, 2).float()
    return low | high << 4, (scale * scales).half(), (minimum * minimums).neg().half()


_READERS: dict[int, Callable[[Tensor], _Parts]] = {
    _Kind.Q8_0: _q8_0,
    _Kind.Q4_0: _q4_0,
    _Kind.Q4_1: _q4_1,
    _Kind.Q5_0: _q5_0,
    _Kind.Q4_K: _q4_k,
}
