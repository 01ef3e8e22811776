"""The device a worker computes on."""

import os
from itertools import product

import torch

from relay.settings import SettingsError

# With these, memory is not from cudaMalloc: another process cannot map it, so KV could not travel.
UNMAPPABLE = ("expandable_segments:true", "backend:cudamallocasync")


def choose_device(name: str) -> torch.device:
    """For DEVICE=`name`: "auto" is the GPU where torch sees one, else the CPU.

    Raises SettingsError when a GPU is asked for and none is seen, or when its memory could not be sent.
    """
    seen = torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and not seen):
        return torch.device("cpu")
    if not seen:
        raise SettingsError(
            "DEVICE=cuda, but torch sees no GPU: check nvidia-smi and that torch was built for CUDA, "
            "or set DEVICE=cpu"
        )
    for variable, option in product(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), UNMAPPABLE):
        if option in os.environ.get(variable, "").replace(" ", "").lower():
            raise SettingsError(f"{variable} has {option}, and KV in such memory cannot be sent: unset it")
    return torch.device("cuda", torch.cuda.current_device())
