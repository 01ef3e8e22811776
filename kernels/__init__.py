"""The operations a model is made of, behind one interface (`kernels.base.Kernels`)."""

import logging
from typing import TYPE_CHECKING

from kernels.base import AttentionBatch, Kernels
from kernels.reference import ReferenceKernels

if TYPE_CHECKING:
    from kernels.cpu import CpuKernels

__all__ = ["KERNEL_NAMES", "AttentionBatch", "Kernels", "load_kernels"]

KERNEL_NAMES = ("auto", "cpu", "reference")

logger = logging.getLogger(__name__)


def load_kernels(name: str, device: str = "cpu") -> Kernels:
    """The kernels called `name`; "auto" takes the C++ ones on a CPU that has AVX2, where they were built.

    Raises ValueError that lists the known names, and ImportError when "cpu" was not built.
    """
    if name not in KERNEL_NAMES:
        raise ValueError(f"unknown kernels {name!r}: choose one of {', '.join(KERNEL_NAMES)}")
    if name == "cpu":
        kernels: Kernels = _compiled()
    else:
        kernels = _best() if name == "auto" and device == "cpu" else ReferenceKernels()
    logger.info("kernels_loaded name=%s isa=%s", kernels.name, getattr(kernels, "isa", "torch"))
    return kernels


def _best() -> ReferenceKernels:
    try:
        kernels = _compiled()
    except ImportError as error:
        logger.warning("kernels_not_built error=%s", error)
        return ReferenceKernels()
    return ReferenceKernels() if kernels.isa == "baseline" else kernels


def _compiled() -> "CpuKernels":
    from kernels.cpu import CpuKernels

    return CpuKernels()
