"""What a worker's KV pool takes of a GPU, and how `kvrelay up` shares GPUs out."""

import subprocess
from types import SimpleNamespace

import pytest

from app.launch.gpus import gpu_env, visible_gpus
from relay.settings import SettingsError
from workers.memory_share import DeviceMemory, left_bytes, working_bytes
from workers.models.config import ModelConfig
from workers.models.rope import RopeConfig

GIB = 1 << 30
LLAMA_8B = ModelConfig(
    "LlamaForCausalLM",
    32,
    4096,
    14336,
    32,
    8,
    128,
    128_256,
    131_072,
    1e-5,
    RopeConfig(5e5),
    False,
    (None,) * 32,
)


def test_a_pool_takes_what_the_share_leaves() -> None:
    memory = DeviceMemory(total=100 * GIB, free=80 * GIB, own=20 * GIB)
    assert left_bytes(memory, 0.5, working=5 * GIB) == 25 * GIB


def test_two_workers_fit_whoever_comes_first() -> None:
    """The second finds less free than the first; both get the same, and together they stay below all."""
    total, weights, working = 141 * GIB, 16 * GIB, 4 * GIB
    first = left_bytes(DeviceMemory(total, total - 2 * weights, weights), 0.45, working)
    second = left_bytes(DeviceMemory(total, total - 2 * weights - first, weights), 0.45, working)
    assert first == second
    assert 2 * (weights + working + first) <= 0.9 * total


def test_what_somebody_else_holds_is_left_to_him() -> None:
    assert left_bytes(DeviceMemory(100 * GIB, 12 * GIB, 20 * GIB), 0.9, working=2 * GIB) == 10 * GIB


@pytest.mark.parametrize("memory", [(24, 6, 16), (24, 1, 2)])
def test_no_room_for_a_pool_says_what_takes_it(memory: tuple[int, int, int]) -> None:
    with pytest.raises(SettingsError, match=r"GPU_MEMORY_FRACTION=0.45 of 24.0 GiB.*CHUNK_TOKENS"):
        left_bytes(DeviceMemory(*(size * GIB for size in memory)), 0.45, working=3 * GIB)


def test_steps_need_more_for_longer_chunks_and_more_rows() -> None:
    least = working_bytes(LLAMA_8B, 512, 1)
    assert 2 * GIB < least < working_bytes(LLAMA_8B, 4096, 1) < working_bytes(LLAMA_8B, 4096, 256) < 5 * GIB


def test_each_graph_has_logits_of_its_own() -> None:
    logits = 4 * 128_256
    sampled = 8 * logits
    assert working_bytes(LLAMA_8B, 512, 4) - working_bytes(LLAMA_8B, 512, 1) == 3 * sampled + (2 + 4) * logits


def test_workers_take_turns_at_the_gpus_and_share_what_they_meet_on() -> None:
    assert gpu_env((), 0, 2, 0.9) == {}
    assert [gpu_env(("7",), n, 2, 0.9) for n in range(2)] == [
        {"CUDA_VISIBLE_DEVICES": "7", "GPU_MEMORY_FRACTION": "0.45"}
    ] * 2
    assert [gpu_env(("0", "1"), n, 3, 0.8) for n in range(3)] == [
        {"CUDA_VISIBLE_DEVICES": "0", "GPU_MEMORY_FRACTION": "0.4"},
        {"CUDA_VISIBLE_DEVICES": "1", "GPU_MEMORY_FRACTION": "0.8"},
        {"CUDA_VISIBLE_DEVICES": "0", "GPU_MEMORY_FRACTION": "0.4"},
    ]


def test_gpus_are_those_that_may_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = SimpleNamespace(stdout="GPU-a1\nGPU-b2\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: shown)
    assert visible_gpus({}) == ("GPU-a1", "GPU-b2")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, 3"}) == ("2", "3")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == ()


@pytest.mark.parametrize("error", [FileNotFoundError(), subprocess.CalledProcessError(9, "nvidia-smi")])
def test_without_a_driver_there_is_no_gpu(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    assert visible_gpus({}) == ()
