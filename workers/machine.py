"""What this machine offers a worker: `python -m workers.machine` prints it as JSON, for `kvrelay doctor`."""

import importlib.util
import json
import os
import platform
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch

from kernels import load_kernels
from relay.settings import Settings
from workers.device import choose_device
from workers.transfer.nixl import load_nixl, new_agent


def main() -> None:
    settings = Settings.from_env()
    print(json.dumps(_torch(settings) | {"nixl": _nixl()}))


def _torch(settings: Settings) -> dict[str, Any]:
    """`error` where DEVICE or KERNELS ask for what is not there."""
    found: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
    try:
        device = choose_device(settings.device)
        found["device"] = device.type
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            found |= {
                "gpu": properties.name,
                "gpu_bytes": properties.total_memory,
                "cuda": torch.version.cuda,
            }
            found["flashinfer"] = (
                version("flashinfer-python") if importlib.util.find_spec("flashinfer") else None
            )
            found["compiles"] = compiles(os.environ)
        kernels = load_kernels(settings.kernels, device.type)
        found |= {"kernels": kernels.name, "isa": getattr(kernels, "isa", None)}
    except (ValueError, ImportError, RuntimeError) as error:
        found["error"] = str(error)
    return found


def compiles(env: Mapping[str, str]) -> bool:
    """Whether FlashInfer can compile kernels that it lacks, or is not to, as in images that have them."""
    home = env.get("CUDA_HOME") or env.get("CUDA_PATH") or "/usr/local/cuda"
    found = shutil.which("nvcc", path=f"{env.get('PATH', '')}:{home}/bin")
    return found is not None or bool(env.get("FLASHINFER_DISABLE_JIT"))


def _nixl() -> dict[str, Any]:
    try:
        api = load_nixl()
        new_agent(api, "doctor")
    except (RuntimeError, ImportError, OSError) as error:
        return {"error": str(error)}
    return {"package": api.__name__, "version": version(api.__name__.replace("_", "-"))}


if __name__ == "__main__":
    main()
