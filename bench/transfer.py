"""How fast KV travels between two processes of this host, beside what a plain memcpy takes.

    python -m bench.transfer [--repeats 7] [--post-mib 64]

Prefill and decode are pinned to a core each and hold SmolLM2-135M's geometry in host memory, in huge pages.
All layer groups are told at once: a line shows what sending costs when no compute hides it. `pieces` is what
the pages went out in, `memcpy` what one core copies of the same bytes.
"""

import argparse
import ctypes
import mmap
import multiprocessing
import os
import queue
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np

from relay.geometry import Geometry
from workers.engine.messages import Computed, Sampled
from workers.transfer.backend import kv_manager
from workers.transfer.base import Destination, KVManager, Seal, Sent, TransferEvent
from workers.transfer.memory import KVMemory

LAYERS = 30
PAGE_SIZE = 16
POOL_PAGES = 512
GROUPS_LAYERS = (1, 2, 5, 10, 30)
PROMPTS_TOKENS = (512, 2048, 4000)
MIB = 1 << 20


def geometry(dtype: str) -> Geometry:
    return Geometry(
        "smollm2-135m", dtype, LAYERS, kv_heads=3, head_dim=64, page_size=PAGE_SIZE, pages=POOL_PAGES
    )


def host_pool(size_bytes: int) -> mmap.mmap:
    """Touched memory, in huge pages where the kernel grants them."""
    pool = mmap.mmap(-1, size_bytes)
    pool.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(pool, np.uint8)[...] = 7
    return pool


def open_manager(
    boot: str, shape: Geometry, post_bytes: int
) -> tuple[KVManager, "queue.SimpleQueue[TransferEvent]", mmap.mmap]:
    pool = host_pool(shape.pages * shape.page_bytes)
    memory = KVMemory(shape, ctypes.addressof(ctypes.c_char.from_buffer(pool)))
    manager = kv_manager("nixl", boot, memory, rows=16, post_bytes=post_bytes)
    events: queue.SimpleQueue[TransferEvent] = queue.SimpleQueue()
    manager.start(events.put)
    return manager, events, pool


def decode(pipe: Connection, core: int, shape: Geometry, post_bytes: int) -> None:
    os.sched_setaffinity(0, {core})
    manager, _, pool = open_manager("decode", shape, post_bytes)
    receiver = manager.receiver(room=1)  # keeps its thread polling
    pipe.send((manager.agent_metadata, receiver.row))
    pipe.recv()
    manager.stop()
    del pool


def memcpy_gbs(size_bytes: int, repeats: int) -> float:
    source, target = host_pool(size_bytes), host_pool(size_bytes)
    to, come_from = (ctypes.addressof(ctypes.c_char.from_buffer(pool)) for pool in (target, source))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        ctypes.memmove(to, come_from, size_bytes)
        times.append(time.perf_counter() - start)
    return size_bytes / statistics.median(times) / 1e9


def page_lists(pages: int, fragmented: bool) -> tuple[list[int], list[int]]:
    """Source and target pages by position: one run on both sides, or scattered over both pools."""
    if not fragmented:
        return list(range(pages)), list(range(9, 9 + pages))
    rng = np.random.default_rng(0)
    return rng.permutation(POOL_PAGES)[:pages].tolist(), rng.permutation(POOL_PAGES)[:pages].tolist()


class Prefill:
    """Sends whole prompts and times them."""

    def __init__(
        self, manager: KVManager, events: "queue.SimpleQueue[TransferEvent]", row: int, peer: bytes
    ) -> None:
        self._manager = manager
        self._events = events
        self._row = row
        self._peer = peer
        self._rooms = iter(range(1, 1 << 30))

    def send(
        self, shape: Geometry, source: Sequence[int], target: Sequence[int], group: int
    ) -> tuple[Sent, float]:
        """The event and the seconds from the first layer group to the row's DONE."""
        room, pages = next(self._rooms), len(source)
        sender = self._manager.sender(room, "leg", source)
        start = time.perf_counter()
        sender.bootstrap(Destination("decode", tuple(target), self._row, 1), self._peer, shape)
        for first in range(0, LAYERS, group):
            sender.computed(Computed("leg", first, min(first + group, LAYERS), 0, pages))
        sender.seal(Seal(room, 1, 1, 0, pages * PAGE_SIZE, pages, Sampled(1), 0))
        sent = self._events.get(timeout=30)
        seconds = time.perf_counter() - start
        assert isinstance(sent, Sent), sent
        sender.close()
        self._events.get(timeout=30)
        return sent, seconds


def measure(dtype: str, repeats: int, post_bytes: int) -> None:
    shape = geometry(dtype)
    cores = sorted(os.sched_getaffinity(0))
    pipe, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    peer = context.Process(target=decode, args=(there, cores[-1], shape, post_bytes), daemon=True)
    peer.start()
    os.sched_setaffinity(0, {cores[0]})
    metadata, row = pipe.recv()
    manager, events, pool = open_manager("prefill", shape, post_bytes)
    prefill = Prefill(manager, events, row, metadata)
    prefill.send(
        shape, *page_lists(POOL_PAGES - 9, fragmented=False), group=LAYERS
    )  # connect, touch every page
    limits = {
        tokens: memcpy_gbs(tokens * shape.page_bytes // PAGE_SIZE, repeats) for tokens in PROMPTS_TOKENS
    }
    for fragmented in (False, True):
        for tokens in PROMPTS_TOKENS:
            source, target = page_lists(-(-tokens // PAGE_SIZE), fragmented)
            for group in GROUPS_LAYERS:
                runs = [prefill.send(shape, source, target, group) for _ in range(repeats)]
                sent, seconds = runs[0][0], statistics.median(seconds for _, seconds in runs)
                gbs = sent.bytes / seconds / 1e9
                print(
                    f"{dtype:9} {'scattered' if fragmented else 'one run':9} {tokens:6} {group:6}"
                    f" {sent.bytes / MIB:8.1f} {sent.descriptors:8} {seconds * 1e3:9.2f} {gbs:7.2f}"
                    f" {limits[tokens]:8.2f} {gbs / limits[tokens]:6.0%}"
                )
    pipe.send(None)
    manager.stop()
    peer.join(10)
    del pool
    os.sched_setaffinity(0, set(cores))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--post-mib", type=int, default=64)
    args = parser.parse_args()
    print("dtype     pages     tokens layers      MiB   pieces        ms    GB/s   memcpy  share")
    for dtype in ("bfloat16", "float32"):
        measure(dtype, args.repeats, args.post_mib * MIB)


if __name__ == "__main__":
    main()
