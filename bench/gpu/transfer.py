"""KV by NIXL between two processes on one device, against a copy within one; it must arrive as it was."""

import multiprocessing
import queue
import time
from multiprocessing.connection import Connection
from statistics import median

import torch

from bench.gpu import limits, shape
from bench.gpu.results import Results, arguments
from relay.geometry import Geometry
from workers.engine.kv_pool import KVPool
from workers.engine.messages import Computed, Sampled
from workers.transfer.backend import kv_manager
from workers.transfer.base import Destination, KVManager, Seal, Sent, TransferEvent
from workers.transfer.memory import KVMemory

PAGE_SIZE = 16
GROUP_LAYERS = 8
PROMPTS_TOKENS = (4096, 16384)
REPEATS = 7
ANSWER_S = 60.0


class End:
    """One side: a pool of noise on the device, and a manager over it."""

    def __init__(self, boot: str, device: torch.device, pages: int, seed: int) -> None:
        size = shape.of(device)
        self.geometry = Geometry("", "bfloat16", size.layers, size.kv_heads, size.head_dim, PAGE_SIZE, pages)
        self.pool = KVPool.allocate(size.pool(pages, PAGE_SIZE), torch.bfloat16, device)
        self.pool.tensor.copy_(noise(self.pool.tensor, seed))
        self.events: queue.SimpleQueue[TransferEvent] = queue.SimpleQueue()
        on_gpu = device.type == "cuda"
        memory = KVMemory(self.geometry, self.pool.address, "VRAM" if on_gpu else "DRAM", 0)
        self.manager: KVManager = kv_manager("nixl", boot, memory, rows=4, post_bytes=64 << 20)
        self.manager.start(self.events.put)


def noise(like: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)


def receive(pipe: Connection, device: torch.device, pages: int) -> None:
    """Answers each page count with whether so many pages equal the sender's."""
    end = End("decode", device, pages, seed=2)
    receiver = end.manager.receiver(1)
    pipe.send((end.manager.agent_metadata, receiver.row))
    sent = noise(end.pool.tensor, seed=1)
    while (count := pipe.recv()) is not None:
        same = end.pool.tensor[:, :count].view(torch.int16) == sent[:, :count].view(torch.int16)
        pipe.send(bool(same.all()))
    end.manager.stop()


def send(end: End, room: int, pages: int, row: int, peer: bytes) -> float:
    """Seconds from the first layer group to the row's DONE; every group is complete at the start."""
    sender = end.manager.sender(room, "leg", tuple(range(pages)))
    start = time.perf_counter()
    sender.bootstrap(Destination("decode", tuple(range(pages)), row, 1), peer, end.geometry)
    layers = end.geometry.layers
    for first in range(0, layers, GROUP_LAYERS):
        sender.computed(Computed("leg", first, min(first + GROUP_LAYERS, layers), 0, pages))
    sender.seal(Seal(room, 1, 1, 0, pages * PAGE_SIZE, pages, Sampled(1), 0))
    event = end.events.get(timeout=ANSWER_S)
    elapsed = time.perf_counter() - start
    assert isinstance(event, Sent), event
    sender.close()
    end.events.get(timeout=ANSWER_S)
    return elapsed


def main() -> None:
    args = arguments(__doc__)
    device = torch.device(args.device)
    results = Results(args.out, "transfer")
    prompts_tokens = PROMPTS_TOKENS if device.type == "cuda" else (64,)
    pages = prompts_tokens[-1] // PAGE_SIZE
    here, there = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    peer = spawn.Process(target=receive, args=(there, device, pages), daemon=True)
    peer.start()
    end = End("prefill", device, pages, seed=1)
    metadata, row = here.recv()
    rooms = iter(range(1, 1 << 30))
    for tokens in prompts_tokens:
        count = tokens // PAGE_SIZE
        size_gb = count * end.geometry.page_bytes / 1e9
        send(end, next(rooms), count, row, metadata)  # connects, and maps the peer's memory
        elapsed_s = median(send(end, next(rooms), count, row, metadata) for _ in range(REPEATS))
        here.send(count)
        if not here.recv():
            raise SystemExit(f"{tokens} tokens did not arrive as they were sent")
        source = end.pool.tensor[:, :count]
        target = torch.empty_like(source)
        copy_s = limits.seconds(lambda: target.copy_(source), device, REPEATS)  # noqa: B023
        goal = ">= 80% of a device copy" if tokens == 4096 else ""
        results.add(f"NIXL, KV of {tokens} tokens", size_gb / elapsed_s, "GB/s", copy_s / elapsed_s, goal)
    here.send(None)
    end.manager.stop()
    peer.join(10)


if __name__ == "__main__":
    main()
