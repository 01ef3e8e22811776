"""The relay with both workers on one device: latencies, tokens/s, and how much of a transfer shows."""

import random
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import torch

from app.measure.table import middle, percentile
from bench import client, serving
from bench.gpu import shape
from bench.gpu.results import Results, arguments
from bench.system import System

CONCURRENT = (1, 8, 32)
PROMPTS_TOKENS = (512, 4096)
MEMORY_FRACTION = 0.5  # of the GPU, by both workers
REPEATS = 5


def exposed(results: Results, http: httpx.Client, tokens: int) -> None:
    """One request at a time: time to first token, and the part of it after compute that the transfer took."""
    rng = random.Random(tokens)
    streams = [client.stream(http, client.random_prompt(rng, tokens), 8) for _ in range(REPEATS + 1)][1:]
    ledgers = [client.record(http, streamed.request_id)["ledger"] for streamed in streams]
    first_ms = middle([streamed.first_s * 1e3 for streamed in streams])
    exposed_ms = middle([ledger["transfer"]["exposed_ms"] for ledger in ledgers])
    results.add(f"time to first token, {tokens} tokens", first_ms, "ms")
    goal = "<= 5% of TTFT" if tokens == 4096 else ""
    results.add(f"exposed transfer, {tokens} tokens", exposed_ms, "ms", exposed_ms / first_ms, goal)


def load(results: Results, url: str, clients: int) -> None:
    streams, seconds = serving.load(url, clients, 1, seed=clients)
    gaps_ms = [1e3 * gap for streamed in streams for gap in streamed.gaps_s]
    first_ms = [1e3 * streamed.first_s for streamed in streams]
    case = f"{clients} clients, {serving.PROMPT_TOKENS} in, {serving.OUTPUT_TOKENS} out"
    results.add(f"{case}: throughput", clients * serving.OUTPUT_TOKENS / seconds, "tokens/s")
    results.add(f"{case}: time to first token", middle(first_ms), "ms")
    results.add(f"{case}: inter-token latency, median", middle(gaps_ms), "ms")
    results.add(f"{case}: inter-token latency, p99", percentile(gaps_ms, 0.99), "ms")


def roomy(size_bytes: int) -> str | None:
    """Memory, where so much of it may hold files; else the default folder for temporary ones."""
    return "/dev/shm" if shutil.disk_usage("/dev/shm").free > size_bytes else None


def main() -> None:
    args = arguments(__doc__)
    device = torch.device(args.device)
    results = Results(args.out, "relay")
    small = device.type == "cpu"
    model = shape.of(device)
    with TemporaryDirectory(dir=roomy(4 * (model.weights + model.vocab * model.hidden))) as folder:
        shape.write(model, Path(folder) / "random", device)
        client.VOCABULARY = range(2, model.vocab)
        env = {
            "MODEL": str(Path(folder) / "random"),
            "SERVED_NAME": "random",
            "DEVICE": args.device,
            "PREFILL_WORKERS": "1",
            "DECODE_WORKERS": "1",
            "KV_POOL_MB": "64" if small else "0",
            "GPU_MEMORY_FRACTION": str(MEMORY_FRACTION),
            "CHUNK_TOKENS": "512" if small else "4096",
            "GROUP_LAYERS": "8",
            "LOG_LEVEL": "INFO",
        }
        with System(**env) as system:
            try:
                with client.connect(system.url) as http:
                    for tokens in (128,) if small else PROMPTS_TOKENS:
                        exposed(results, http, tokens)
                for clients in (1, 2) if small else CONCURRENT:
                    load(results, system.url, clients)
            finally:
                (args.out / "up.log").write_text(system.log())


if __name__ == "__main__":
    main()
