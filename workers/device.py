"""The device a worker computes on."""

import os

import torch

from relay.settings import SettingsError


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
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        # Such segments are no cudaMalloc memory: another process cannot map them, so KV could not travel.
        if "expandable_segments:true" in os.environ.get(variable, "").lower():
            raise SettingsError(
                f"{variable} turns expandable segments on, and KV in them cannot be sent: unset it"
            )
    return torch.device("cuda", torch.cuda.current_device())
