"""The contract over every set of kernels that a CPU runs, and which one is taken."""

import pytest
import torch

from kernels import Kernels, _native, load_kernels
from kernels.cpu import _DTYPES, _FORMATS, CpuKernels, usable_isas
from tests.kernel_contract import *  # noqa: F403 - its tests are collected here
from tests.kernel_contract import TOLERANCE
from tests.kernel_sets import ALL, kernels_called


@pytest.fixture(params=ALL)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_called(request.param)


def test_unknown_kernels_are_named() -> None:
    with pytest.raises(ValueError, match="reference"):
        load_kernels("abacus")


def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=usable_isas()[0]):
        CpuKernels("sse9")


def test_auto_takes_what_was_built_and_only_for_a_cpu() -> None:
    expected = "reference" if usable_isas() == ["baseline"] else "cpu"
    assert load_kernels("auto").name == expected
    assert load_kernels("auto", "cuda").name in ("flashinfer", "reference")
    with pytest.raises(ValueError, match="KERNELS=auto"):
        load_kernels("cpu", "cuda")


@pytest.mark.parametrize("isa", usable_isas())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("outputs", "depth"), [(16, 32), (33, 64), (100, 80), (7, 6), (65, 1600)])
def test_a_product_depends_on_its_row_alone(isa: str, dtype: torch.dtype, outputs: int, depth: int) -> None:
    """A token's result is the same whatever else is in its batch."""
    operations = _native.Operations(_DTYPES[dtype], isa, _native.ThreadPool(2))
    x = torch.randn(150, depth).to(dtype)
    weight = (torch.randn(outputs, depth) / depth**0.5).to(dtype)
    rows_of_weight = _native.MatrixRows(_FORMATS[dtype], weight.data_ptr())
    expected = x.double() @ weight.double().T

    def product(first: int, rows: int) -> torch.Tensor:
        out = x.new_empty(rows, outputs)
        operations.linear(
            x=x[first].data_ptr(),
            rows=rows,
            weights=rows_of_weight,
            outputs=outputs,
            depth=depth,
            out=out.data_ptr(),
        )
        return out

    whole = product(0, len(x))
    torch.testing.assert_close(whole.double(), expected, **TOLERANCE[dtype])
    for rows in (1, 2, 5, 8, 15, 16, 17, 31, 32, 33, 48, 49, 70):
        for first in (0, 80):
            assert torch.equal(product(first, rows), whole[first : first + rows])
