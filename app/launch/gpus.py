"""Which GPU each worker of `kvrelay up` gets, and how much of it."""

import subprocess
from collections.abc import Mapping


def visible_gpus(env: Mapping[str, str]) -> tuple[str, ...]:
    """As CUDA_VISIBLE_DEVICES names them: what it lists, or else all that the driver shows. Empty: none."""
    listed = env.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return tuple(gpu.strip() for gpu in listed.split(",") if gpu.strip() not in ("", "-1"))
    try:
        command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(shown.split())


def gpu_env(gpus: tuple[str, ...], worker: int, workers: int, fraction: float) -> dict[str, str]:
    """What worker number `worker` of `workers` finds in its environment: they take turns at the GPUs, and
    those that share one divide `fraction` of its memory."""
    if not gpus:
        return {}
    gpu = worker % len(gpus)
    sharing = len(range(gpu, workers, len(gpus)))
    return {"CUDA_VISIBLE_DEVICES": gpus[gpu], "GPU_MEMORY_FRACTION": f"{fraction / sharing:.4g}"}
