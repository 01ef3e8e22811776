"""The operations a model is made of, behind one interface (`kernels.base.Kernels`)."""

from kernels.base import AttentionBatch, Kernels

__all__ = ["AttentionBatch", "Kernels", "load_kernels"]

KERNEL_NAMES = ("reference",)


def load_kernels(name: str) -> Kernels:
    """Return the kernels called `name`. Raises ValueError that lists the known names."""
    if name == "reference":
        from kernels.reference import ReferenceKernels

        return ReferenceKernels()
    raise ValueError(f"unknown kernels {name!r}: choose one of {', '.join(KERNEL_NAMES)}")
