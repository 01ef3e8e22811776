"""Which device a worker takes, and how a step on a GPU tells what is done. The GPU is played."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.decoder import ends_group
from relay.geometry import Geometry
from relay.settings import SettingsError
from workers.device import choose_device
from workers.engine.messages import Ready
from workers.engine.runner import ModelRunner
from workers.transfer.loopback import LoopbackTransport
from workers.transfer.memory import KVMemory, MemoryKind
from workers.transfer.nixl import NixlTransport
from workers.transfer.rows import Rows
from workers.transfer.thread import TransferThread


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu() -> None:
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    with pytest.raises(SettingsError, match="DEVICE=cpu"):
        choose_device("cuda")


@pytest.mark.usefixtures("gpu")
def test_with_a_gpu() -> None:
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", 0)
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("options", ["a:1,expandable_segments:True", "backend: cudaMallocAsync"])
def test_memory_that_others_cannot_map_is_refused(
    variable: str, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, options)
    with pytest.raises(SettingsError, match=f"{variable} .*cannot be sent"):
        choose_device("auto")


class Events:
    """Plays the stream: an event is reached when `done` says as many were recorded before it."""

    def __init__(self) -> None:
        self.recorded = 0
        self.done = 0

    def make(self) -> Any:
        own = SimpleNamespace(at=0)

        def record() -> None:
            self.recorded += 1
            own.at = self.recorded

        return SimpleNamespace(record=record, query=lambda: own.at <= self.done)


class PlayedModel:
    """Queues its layers and returns before any is done."""

    kernels = None

    def forward(self, *args: Any) -> None:
        on_layer: Callable[[int], None] = args[4]
        for layer in range(5):
            if ends_group(layer, args[6], 5):
                on_layer(layer)


def runner(is_cuda: bool, group_bytes: int = 0) -> ModelRunner:
    kv = SimpleNamespace(tensor=SimpleNamespace(shape=(5, 8), is_cuda=is_cuda), layer_token_bytes=100)
    return ModelRunner(PlayedModel(), kv, 2, group_bytes)  # type: ignore[arg-type]


def parts_of(runner: ModelRunner) -> list[tuple[int, int, Ready | None]]:
    parts: list[tuple[int, int, Ready | None]] = []
    attention = SimpleNamespace(tokens=10)
    batch = SimpleNamespace(input_tokens=lambda: None, positions=None, logit_rows=None, attention=attention)
    runner.forward(batch, None, lambda first, last, ready: parts.append((first, last, ready)))  # type: ignore[arg-type]
    return parts


def test_layer_groups_are_ready_when_the_device_is_past_them(monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events()
    monkeypatch.setattr(torch.cuda, "Event", events.make)
    parts = parts_of(runner(is_cuda=True))
    assert [part[:2] for part in parts] == [(0, 2), (2, 4), (4, 5)]
    for done in range(4):
        events.done = done
        assert [ready is not None and ready() for _, _, ready in parts] == [i < done for i in range(3)]


def test_on_a_cpu_there_is_nothing_to_wait_for() -> None:
    assert parts_of(runner(is_cuda=False)) == [(0, 2, None), (2, 4, None), (4, 5, None)]


def test_short_prompts_go_out_in_fewer_groups() -> None:
    parts = parts_of(runner(is_cuda=False, group_bytes=3 * 10 * 100))
    assert parts == [(0, 3, None), (3, 5, None)]


@pytest.mark.parametrize(("kind", "calls"), [("VRAM", [("set", 3), ("wait",)]), ("DRAM", [])])
def test_the_thread_that_posts_makes_the_device_its_own(
    kind: MemoryKind, calls: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[object, ...]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: made.append(("set", index)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: made.append(("wait",)))
    transport = NixlTransport.__new__(NixlTransport)
    transport._memory = KVMemory(Geometry("", "bfloat16", 1, 1, 64, 16, 1), 0, kind, 3)
    transport.begin()
    assert made == calls


class Beginning(LoopbackTransport):
    """Notes the thread that began it, and stops there."""

    begun: str | None = None

    def begin(self) -> None:
        Beginning.begun = threading.current_thread().name


def test_a_transport_is_begun_on_the_thread_that_posts() -> None:
    memory, rows = KVMemory(Geometry("", "bfloat16", 1, 1, 64, 16, 1), 0), Rows(1)
    thread = TransferThread(Beginning("boot", memory, rows), memory, rows, 4096, digest=False)
    thread.start(lambda _: None)
    thread.stop()
    assert Beginning.begun == "transfer"


def test_a_step_is_launched_ahead_only_where_the_device_computes_by_itself() -> None:
    assert (runner(is_cuda=True).ahead, runner(is_cuda=False).ahead) == (1, 0)
