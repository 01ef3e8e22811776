"""The kernels that this machine can run, for tests over all of them."""

from functools import cache

from kernels import Kernels
from kernels.cpu import CpuKernels, usable_isas
from kernels.reference import ReferenceKernels

ALL = ["reference", *usable_isas()]
FASTEST = ["reference", usable_isas()[0]]


@cache
def kernels_called(name: str) -> Kernels:
    """By "reference" or an instruction set. Two threads, so that they must meet."""
    return ReferenceKernels() if name == "reference" else CpuKernels(name, threads=2)
