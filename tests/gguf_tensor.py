"""GGUF files of one tensor."""

from pathlib import Path

import gguf
import numpy as np

from relay.model_file import default_model_path
from tests.models import write_out
from workers.models import ModelConfig
from workers.models.gguf_file import GGUFWeights

Kind = gguf.GGMLQuantizationType

# Where a block has float16 numbers: of random bits they would not be finite.
_HALVES = {
    Kind.Q8_0: (0,),
    Kind.Q5_0: (0,),
    Kind.Q5_1: (0, 2),
    Kind.Q4_0: (0,),
    Kind.Q4_1: (0, 2),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
}


def random_blocks(kind: Kind, rows: int, blocks: int = 2) -> np.ndarray:
    """Rows of quantized blocks, every bit random but those that make a scale too large."""
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    drawn = np.random.default_rng(0).integers(256, size=(rows, blocks, block_bytes), dtype=np.uint8)
    for at in _HALVES[kind]:
        drawn[..., at + 1] = drawn[..., at + 1] & 0x83 | 0x28  # 2^-5 to 2^-4, of either sign
    return drawn.reshape(rows, -1)


def write_tensor(path: Path, data: np.ndarray, kind: Kind) -> GGUFWeights:
    """A GGUF file of one tensor, opened; `data` is the tensor's bytes where it is quantized."""
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_tensor("token_embd.weight", data, raw_dtype=kind)
    write_out(writer)
    return GGUFWeights(path, ModelConfig.load(default_model_path()))
