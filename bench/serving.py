"""One prefill and one decode worker on a core each, beside one unified worker on both cores."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

from app.measure.table import middle, percentile, show
from bench import client, machine
from bench.system import System

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 128
CONCURRENT = (1, 4, 8, 16)
ROUNDS = 2  # requests per client
LAYOUTS = {
    "1 prefill + 1 decode": {"PREFILL_WORKERS": "1", "DECODE_WORKERS": "1"},
    "1 unified": {"PREFILL_WORKERS": "0", "DECODE_WORKERS": "0", "UNIFIED_WORKERS": "1"},
}


def run() -> None:
    rows = []
    for layout, env in LAYOUTS.items():
        with System(**env) as system:
            load(system.url, 1, 1, seed=0)
            for concurrent in CONCURRENT:
                streams, seconds = load(system.url, concurrent, ROUNDS, seed=concurrent)
                first_s = [streamed.first_s for streamed in streams]
                gaps_ms = [1e3 * gap for streamed in streams for gap in streamed.gaps_s]
                tokens_s = len(streams) * OUTPUT_TOKENS / seconds
                rows.append(
                    (
                        layout,
                        concurrent,
                        middle(first_s),
                        percentile(first_s, 0.99),
                        middle(gaps_ms),
                        percentile(gaps_ms, 0.99),
                        tokens_s,
                    )
                )
    show(
        f"Closed loop, {PROMPT_TOKENS} tokens in, {OUTPUT_TOKENS} out, {ROUNDS} requests per client",
        ("layout", "clients", "TTFT s", "p99", "ITL ms", "p99", "tokens/s"),
        rows,
    )


def load(url: str, clients: int, rounds: int, seed: int) -> tuple[list[client.Streamed], float]:
    """What `clients` at once saw, each doing `rounds` requests one after the other, and how long it took."""

    def one(number: int) -> list[client.Streamed]:
        rng = random.Random(seed * 1000 + number)
        with client.connect(url) as http:
            return [
                client.stream(http, client.random_prompt(rng, PROMPT_TOKENS), OUTPUT_TOKENS)
                for _ in range(rounds)
            ]

    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        streams = [streamed for found in threads.map(one, range(clients)) for streamed in found]
    return streams, time.perf_counter() - start


if __name__ == "__main__":
    print(machine.name())
    run()
