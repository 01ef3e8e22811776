"""How large a worker's KV pool may be: on a GPU, what others and its own work leave of it."""

from typing import NamedTuple

import torch

from kernels.cuda_graphs import graph_rows
from relay.settings import Settings, SettingsError
from workers.models import Model, ModelConfig

HOST_POOL_BYTES = 512 << 20

# The CUDA context, FlashInfer's workspaces, what cuBLAS keeps, the graphs of all batch sizes, scored prompts.
_FIXED_BYTES = 2 << 30
_WIDE_ROWS = 8  # float32 rows of the vocabulary that sampling holds for each token, its float64 sums as two


class DeviceMemory(NamedTuple):
    """Bytes of a GPU: all, what nobody holds, and what this process holds already, its weights."""

    total: int
    free: int
    own: int

    @classmethod
    def of(cls, device: torch.device) -> "DeviceMemory":
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free, torch.cuda.memory_reserved(device))


def pool_bytes(settings: Settings, model: Model, max_rows: int) -> int:
    """Of a worker whose steps decode `max_rows` requests at most. Raises SettingsError as `left_bytes`."""
    if settings.kv_pool_mb:
        return settings.kv_pool_mb << 20
    if model.device.type == "cpu":
        return HOST_POOL_BYTES
    working = working_bytes(model.config, settings.chunk_tokens, max_rows)
    return left_bytes(DeviceMemory.of(model.device), settings.gpu_memory_fraction, working)


def working_bytes(config: ModelConfig, chunk_tokens: int, max_rows: int) -> int:
    """What steps need beside weights and KV, at 16 bits: a chunk's activations, logits while sampled, and for
    each graph logits of its own."""
    qkv = (config.heads + 2 * config.kv_heads) * config.head_dim
    per_token = 3 * config.intermediate_size + 2 * qkv + 4 * config.hidden_size
    wide_rows = _WIDE_ROWS * max_rows + sum(graph_rows(max_rows))
    return _FIXED_BYTES + 2 * chunk_tokens * per_token + 4 * config.vocab_size * wide_rows


def left_bytes(memory: DeviceMemory, fraction: float, working: int) -> int:
    """For a worker that takes `fraction` of the GPU in all, after its weights and `working` bytes.

    Other workers may be loading at the same moment, so its share counts from the total, and what is free only
    where somebody else holds more than was left to him. Raises SettingsError when nothing is left.
    """
    share = int(memory.total * fraction) - memory.own
    left = min(share, memory.free) - working
    if left <= 0:
        raise SettingsError(
            f"GPU_MEMORY_FRACTION={fraction:.3g} of {_gib(memory.total)} leaves no KV pool: "
            f"{_gib(memory.own)} are weights, {_gib(working)} what steps need, {_gib(memory.free)} are free. "
            "Raise it, lower CHUNK_TOKENS or MAX_RUNNING, end what else holds the GPU, or use a smaller model"
        )
    return left


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"
