"""GGUF tensors in the bits of their file, against what the gguf package makes of them."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from kernels.quantized_matrix import GROUP, QuantizedMatrix
from relay.model_file import default_model_path
from tests.gguf_tensor import random_blocks, write_tensor
from workers.models import ModelConfig
from workers.models.gguf_file import GGUFWeights

Kind = gguf.GGMLQuantizationType
NAME = "model.embed_tokens.weight"


def read(path: Path, kind: Kind) -> tuple[QuantizedMatrix | None, torch.Tensor]:
    blocks = random_blocks(kind, 5)
    matrix = write_tensor(path / "one.gguf", blocks, kind).read_quantized(NAME)
    return matrix, torch.from_numpy(gguf.quants.dequantize(blocks, kind).copy())


@pytest.mark.parametrize(("kind", "bits"), [(Kind.Q8_0, 8), (Kind.Q5_0, 8), (Kind.Q4_0, 4), (Kind.Q4_1, 4)])
def test_kinds_that_are_kept_as_they_are(kind: Kind, bits: int, tmp_path: Path) -> None:
    matrix, values = read(tmp_path, kind)
    assert matrix is not None
    assert matrix.bits == bits
    torch.testing.assert_close(matrix.dense(torch.float32), values, rtol=1e-6, atol=0)


def test_the_scales_of_q4_k_become_float16(tmp_path: Path) -> None:
    matrix, values = read(tmp_path, Kind.Q4_K)
    assert matrix is not None
    assert matrix.minimums is not None
    assert matrix.bits == 4
    # Half a unit in the last of 11 bits, of the scale 15 times and of the minimum.
    bound = (matrix.scales.float() * 15).abs() + matrix.minimums.float().abs()
    errors = (matrix.dense(torch.float32) - values).view(5, -1, GROUP).abs().amax(-1)
    assert (errors <= bound * 2**-11).all()
    assert (errors > 0).any()


@pytest.mark.parametrize("kind", [Kind.Q5_1, Kind.Q5_K, Kind.Q6_K])
def test_kinds_without_a_form_take_the_nearest_eight_bits(kind: Kind, tmp_path: Path) -> None:
    matrix, values = read(tmp_path, kind)
    assert matrix is not None
    assert matrix.bits == 8
    groups = values.view(5, -1, GROUP)
    errors = (matrix.dense(torch.float32).view_as(groups) - groups).abs().amax(-1)
    assert (errors <= groups.abs().amax(-1) * (1 / 254 + 2**-10)).all()


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16])
def test_plain_tensors_have_no_few_bits(kind: Kind, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((3, 64), dtype=np.float32)
    weights = write_tensor(tmp_path / "one.gguf", gguf.quants.quantize(values, kind), kind)
    assert weights.read_quantized(NAME) is None


@pytest.mark.parametrize("module", ["self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"])
def test_rows_stand_where_they_do_in_float32(module: str) -> None:
    """Files of this architecture interleave the halves of each head of q and k."""
    weights = GGUFWeights(default_model_path(), ModelConfig.load(default_model_path()))
    name = f"model.layers.3.{module}.weight"
    matrix = weights.read_quantized(name)
    assert matrix is not None
    assert weights.kind(name) == "Q4_1"
    torch.testing.assert_close(matrix.dense(torch.float32), weights.read(name), rtol=1e-6, atol=1e-9)
