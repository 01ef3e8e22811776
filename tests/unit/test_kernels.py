"""The contract over every set of kernels that a CPU runs, and which one is taken."""

import pytest

from kernels import Kernels, load_kernels
from kernels.cpu import CpuKernels, usable_isas
from tests.kernel_contract import *  # noqa: F403 - its tests are collected here
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
