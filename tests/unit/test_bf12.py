"""bfloat16 that is packed in 12 bits: nothing is lost, whatever the exponents."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels import AttentionBatch, _native
from kernels.cpu import _DTYPES, CpuKernels, NativePass, usable_isas
from kernels.decoder import Decoder
from tests.models import random_model, save_directory
from workers.models import load_model

NARROW = [isa for isa in usable_isas() if isa != "baseline"]
"""Those that can read it; others pack bfloat16 as it is."""


def linear(isa: str, x: Tensor, weight: Tensor) -> Tensor:
    assert x.dtype == weight.dtype == torch.bfloat16
    out = x.new_empty(len(x), len(weight))
    _native.Operations(_DTYPES[x.dtype], isa, _native.ThreadPool(2)).linear(
        x=x.contiguous().data_ptr(),
        rows=len(x),
        weights=_native.MatrixRows(_native.Format.bfloat16, weight.data_ptr()),
        outputs=len(weight),
        depth=weight.shape[1],
        out=out.data_ptr(),
    )
    return out


def with_exceptions(outputs: int, depth: int) -> Tensor:
    """Few enough values far from the others that it is packed in 12 bits: tiny, huge and subnormal ones."""
    generator = torch.Generator().manual_seed(outputs * depth)
    weight = torch.randn(outputs, depth, generator=generator) / 8
    weight[torch.rand(outputs, depth, generator=generator) < 0.01] = 0
    weight[0, 0], weight[-1, -1], weight[outputs // 2, depth // 2] = 2e30, -3e-38, 1e-39
    spread = max(1, outputs * depth // 300)
    places = torch.randperm(outputs * depth, generator=generator)[: spread - 3 if spread > 3 else 0]
    weight.view(-1)[places] *= 2.0**-40
    return weight.bfloat16()


@pytest.mark.parametrize("isa", usable_isas())
@pytest.mark.parametrize("rows", [1, 2, 7, 13, 15, 16, 17, 32, 33, 40, 47, 48, 96])
@pytest.mark.parametrize(("outputs", "depth"), [(40, 96), (17, 192)])
def test_every_value_comes_back(isa: str, rows: int, outputs: int, depth: int) -> None:
    """A row of the unit matrix has one product that is not zero."""
    weight = with_exceptions(outputs, depth)
    unit = torch.eye(depth, dtype=torch.bfloat16)
    for first in range(0, depth, rows):
        part = unit[first : first + rows]
        found = linear(isa, part, weight)
        expected = weight.T[first : first + rows]
        # The multiplication itself takes subnormal values for zeros, in some instructions.
        normal = expected.abs() >= torch.finfo(torch.bfloat16).tiny
        assert torch.equal(found[normal], expected[normal])
        assert (found[~normal].abs() <= torch.finfo(torch.bfloat16).tiny).all()


@pytest.mark.parametrize("isa", NARROW)
@pytest.mark.parametrize("scale", [2.0**-126, 2.0**-100, 1.0, 2.0**115])
def test_exponents_anywhere(isa: str, scale: float) -> None:
    weight = (torch.randn(32, 64, generator=torch.Generator().manual_seed(1)) * scale).bfloat16()
    unit = torch.eye(64, dtype=torch.bfloat16)
    normal = weight.T.abs() >= torch.finfo(torch.bfloat16).tiny
    assert torch.equal(linear(isa, unit, weight)[normal], weight.T[normal])


@pytest.mark.parametrize("isa", NARROW)
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_no_number_stays_what_it_is(isa: str, broken: float) -> None:
    weight = with_exceptions(33, 96)
    weight[20, 50] = broken
    for rows in (1, 40):
        x = torch.ones(rows, 96, dtype=torch.bfloat16)
        finite = linear(isa, x, weight).isfinite()
        assert not finite[:, 20].any()
        assert finite[:, :20].all()
        assert finite[:, 21:].all()


@pytest.mark.parametrize("isa", NARROW)
def test_exponents_all_over_stay_as_they_are(isa: str) -> None:
    """Too many exceptions: such a matrix is packed in 16 bits."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.ldexp(
        torch.randn(48, 64, generator=generator), torch.randint(-60, 60, (48, 64), generator=generator)
    ).bfloat16()
    assert torch.equal(linear(isa, torch.eye(64, dtype=torch.bfloat16), weight), weight.T.contiguous())


@pytest.mark.parametrize("isa", NARROW)
def test_embeddings_come_back(isa: str) -> None:
    """Through a decoder without layers, whose head is the unit matrix: what is left is the norm."""
    vocab, hidden = 256, 64
    embedding = with_exceptions(vocab, hidden)
    embedding[::32, ::16] = 64.0  # these are exceptions that can be told from zeros
    decoder = Decoder(
        heads=1,
        kv_heads=1,
        head_dim=hidden,
        intermediate_size=hidden,
        rms_norm_eps=1e-6,
        embedding=embedding,
        layers=(),
        final_norm=torch.ones(hidden, dtype=torch.bfloat16),
        head=torch.eye(vocab, hidden, dtype=torch.bfloat16),
        cos_sin=torch.zeros(vocab, hidden),
    )
    kernels = CpuKernels(isa, threads=2)
    found = kernels.compile(decoder)(
        torch.arange(vocab),
        torch.arange(vocab),
        torch.zeros(0, 16, 2, 16, 1, hidden, dtype=torch.bfloat16),
        kernels.plan(AttentionBatch([vocab], [vocab], [list(range(16))], 16), torch.device("cpu")),
        None,
        torch.arange(vocab),
    )
    wide = embedding.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(found[:, :hidden].double(), expected, atol=1e-6, rtol=2**-7)


@pytest.mark.parametrize("isa", NARROW)
def test_a_model_takes_three_quarters(isa: str, tmp_path: Path) -> None:
    directory = save_directory(random_model("llama"), tmp_path)
    sizes = {}
    for dtype in ("bfloat16", "float32"):
        packed = load_model(directory, dtype, "cpu", CpuKernels(isa, threads=1), "dtype").forward_pass
        assert isinstance(packed, NativePass)
        sizes[dtype] = packed.weight_bytes
    assert 12 / 32 < sizes["bfloat16"] / sizes["float32"] < 12.5 / 32
