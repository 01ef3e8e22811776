"""A KV pool in host memory with a manager over it, and what to wait for: what transfer tests stand on."""

import queue
import time
from collections.abc import Callable, Sequence

import numpy as np

from relay.geometry import Geometry
from workers.engine.messages import Computed, Sampled
from workers.transfer.backend import kv_manager
from workers.transfer.base import Destination, KVManager, KVSender, Seal, TransferEvent
from workers.transfer.memory import KVMemory

LAYERS = 4
DEADLINE_S = 20.0


def geometry(pages: int, page_size: int = 16, layers: int = LAYERS) -> Geometry:
    """Blocks of 8 KiB with the default page size."""
    return Geometry("test", "float32", layers, 1, 64, page_size, pages)


def until(true: Callable[[], object], what: str = "the condition", deadline_s: float = DEADLINE_S) -> None:
    """Poll until `true()`; fail the test after the deadline."""
    end = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < end, f"{what} did not come true within {deadline_s} s"
        time.sleep(0.002)


class KVWorker:
    """`pool` [layers, pages, block bytes] uint8, filled with seeded noise."""

    def __init__(
        self,
        boot: str,
        shape: Geometry,
        backend: str,
        seed: int,
        rows: int = 8,
        post_bytes: int = 1 << 20,
        make: Callable[..., KVManager] | None = None,
    ) -> None:
        self.boot = boot
        self.geometry = shape
        size = (shape.layers, shape.pages, shape.layer_page_bytes)
        self.pool = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        self.memory = KVMemory(shape, self.pool.ctypes.data)
        self._events: queue.SimpleQueue[TransferEvent] = queue.SimpleQueue()
        if make is None:
            self.manager = kv_manager(backend, boot, self.memory, rows, post_bytes, digest=True)
        else:
            self.manager = make(boot, self.memory, rows, post_bytes, digest=True)
        self.manager.start(self._events.put)

    def event(self, deadline_s: float = DEADLINE_S) -> TransferEvent:
        return self._events.get(timeout=deadline_s)

    def no_event(self, within_s: float) -> bool:
        """True when nothing is told for that long."""
        try:
            self._events.get(timeout=within_s)
        except queue.Empty:
            return True
        return False

    def address(self) -> tuple[bytes, Geometry]:
        """What KVSender.bootstrap needs to know about this worker."""
        return self.manager.agent_metadata, self.geometry

    def content(self, pages: Sequence[int]) -> bytes:
        return self.pool[:, list(pages)].tobytes()

    def others(self, pages: Sequence[int]) -> int:
        """A checksum over every byte outside of these pages: the canaries."""
        return self.memory.digest(sorted(set(range(self.geometry.pages)) - set(pages)))


def destination(worker: KVWorker, pages: Sequence[int], row: int, first_page: int = 0) -> Destination:
    return Destination(worker.boot, tuple(pages), row, nonce=99, first_page=first_page)


def seal_of(room: int, pages: int) -> Seal:
    return Seal(room, 1, 99, 0, pages * 16 - 3, pages, Sampled(7, [[7, -0.5], [8, -1.0]]), cached_tokens=16)


def compute(sender: KVSender, pages: int, layers: int = LAYERS, group: int = 2) -> None:
    """Tell all pages computed, layer group by layer group."""
    for first in range(0, layers, group):
        sender.computed(Computed("key", first, min(first + group, layers), 0, pages))
