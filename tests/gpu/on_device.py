"""Kernels of a device for tests that hold their tensors on the CPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels import AttentionBatch, Kernels


class OnDevice:
    """See `kernels.base.Kernels`: arguments go to the device and results come back, what a call wrote into an
    argument too."""

    def __init__(self, kernels: Kernels, device: torch.device) -> None:
        self.name = kernels.name
        self._kernels = kernels
        self._device = device

    def plan(self, batch: AttentionBatch, device: torch.device) -> Any:
        return self._kernels.plan(batch, self._device)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(self._kernels, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            # Strides matter: `append` gets views of a fused projection.
            there = [there_of(each, self._device) if isinstance(each, Tensor) else each for each in args]
            result = operation(*there, **kwargs)
            for own, moved in zip(args, there, strict=True):
                if isinstance(own, Tensor):
                    own.copy_(moved)
            return back(result)

        return call


def there_of(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device that is strided as the original is."""
    if tensor.numel() == 0:
        return tensor.to(device)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    flat = tensor.as_strided((extent,), (1,)).to(device)
    return flat.as_strided(tensor.shape, tensor.stride())


def back(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(back(each) for each in result)
    return result.cpu() if isinstance(result, Tensor) else result
