"""The contract suite of the kernels over those of the GPU, plain torch and FlashInfer, and FlashInfer in the
dtypes and head sizes that are its own."""

from importlib.util import find_spec
from itertools import product

import pytest
import torch

from kernels import Kernels, load_kernels
from tests.gpu.on_device import OnDevice
from tests.kernel_contract import *  # noqa: F403 - its tests are collected here
from tests.kernel_contract import PagedCase

CUDA = torch.device("cuda")
DECODES = [(1, 1), (1, 33), (1, 300), (1, 64), (1, 2000)]
GROUPS = [(4, 4), (6, 2), (8, 2), (9, 3), (32, 8)]


@pytest.fixture(params=["reference", "flashinfer"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "flashinfer" and find_spec("flashinfer") is None:
        pytest.skip("FlashInfer is not installed")
    return OnDevice(load_kernels(request.param, "cuda"), CUDA)  # type: ignore[return-value]


@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
@pytest.mark.parametrize(("head_dim", "page_size"), list(product([64, 128], [1, 16, 64])))
def test_bfloat16_attention(
    kernels: Kernels, head_dim: int, page_size: int, heads: int, kv_heads: int
) -> None:
    for lens in (None, DECODES):
        case = PagedCase(page_size, heads, kv_heads, head_dim, torch.bfloat16, *([lens] if lens else []))
        torch.testing.assert_close(case.run(kernels).double(), case.expected(), atol=3e-2, rtol=2e-2)
        torch.testing.assert_close(case.layer_kv, case.complete, rtol=0, atol=0, equal_nan=True)


def test_bfloat16_rope(kernels: Kernels) -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(5, heads, 64, dtype=torch.bfloat16) for heads in (6, 2))
    angles = torch.rand(100, 32) * 6
    positions = torch.tensor([0, 99, 3, 3, 50])
    cache = torch.cat((angles.cos(), angles.sin()), dim=-1)
    expected = load_kernels("reference").rope(q.clone(), k.clone(), positions, cache)
    turned = kernels.rope(q.clone(), k.clone(), positions, cache)
    torch.testing.assert_close(turned, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("window", "cap"), [(1, None), (20, None), (1000, None), (None, 1.5)])
def test_bfloat16_window_and_soft_cap(kernels: Kernels, window: int | None, cap: float | None) -> None:
    for lens in (None, DECODES):
        case = PagedCase(16, 6, 2, 64, torch.bfloat16, *([lens] if lens else []))
        got = case.run(kernels, sliding_window=window, logit_soft_cap=cap)
        torch.testing.assert_close(got.double(), case.expected(window, cap), atol=3e-2, rtol=2e-2)
