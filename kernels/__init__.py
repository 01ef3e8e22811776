"""The operations a model is made of, behind one interface (`kernels.base.Kernels`)."""

import logging
import os
from typing import TYPE_CHECKING

from kernels.base import AttentionBatch, Kernels
from kernels.reference import ReferenceKernels

if TYPE_CHECKING:
    from kernels.cpu import CpuKernels
    from kernels.flashinfer import FlashInferKernels

__all__ = ["KERNEL_NAMES", "AttentionBatch", "Kernels", "load_kernels"]

KERNEL_NAMES = ("auto", "cpu", "flashinfer", "reference")

logger = logging.getLogger(__name__)


def load_kernels(name: str, device: str = "cpu") -> Kernels:
    """The kernels called `name`; "auto" takes FlashInfer on a GPU and C++ on a CPU that has AVX2, where they
    are installed, else plain torch.

    Raises ValueError that lists the known names or says that they do not run on this device, and ImportError
    when what was named is not installed.
    """
    if name not in KERNEL_NAMES:
        raise ValueError(f"unknown kernels {name!r}: choose one of {', '.join(KERNEL_NAMES)}")
    if name in ("cpu", "flashinfer") and (name == "cpu") != (device == "cpu"):
        raise ValueError(f"KERNELS={name} does not compute on {device}: set KERNELS=auto, or another DEVICE")
    if name == "cpu":
        kernels: Kernels = _compiled()
    elif name == "flashinfer":
        kernels = _flashinfer()
    elif name == "auto":
        kernels = _best_on_cpu() if device == "cpu" else _best_on_gpu()
    else:
        kernels = ReferenceKernels()
    logger.info("kernels_loaded name=%s isa=%s", kernels.name, getattr(kernels, "isa", "torch"))
    return kernels


def _best_on_gpu() -> ReferenceKernels:
    try:
        return _flashinfer()
    except ImportError as error:
        logger.warning("flashinfer_not_installed error=%s (pip install 'kvrelay[gpu]')", error)
        return ReferenceKernels()


def _best_on_cpu() -> ReferenceKernels:
    try:
        kernels = _compiled()
    except ImportError as error:
        logger.warning("kernels_not_built error=%s", error)
        return ReferenceKernels()
    return ReferenceKernels() if kernels.isa == "baseline" else kernels


def _compiled() -> "CpuKernels":
    from kernels.cpu import CpuKernels

    return CpuKernels()


def _flashinfer() -> "FlashInferKernels":
    # Its norms in CUDA can be compiled ahead, as all else; those of the CuTe DSL compile when they first run.
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    from kernels.flashinfer import FlashInferKernels

    return FlashInferKernels()
