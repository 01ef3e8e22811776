"""What tracing costs: tokens per second with every request exported and with none, in turns on one system.

Stamping a timeline goes on in both, since it cannot be turned off; what that takes of Redis is told apart.
"""

import itertools
import os
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from redis import Redis

from app.measure.table import show
from bench import client, machine
from bench.system import System

STREAMS, PROMPT_TOKENS, TOKENS = 8, 64, 64
TURNS = 12  # of each kind, after one that is not counted
SETTLE_S = 2.0  # what a turn leaves to be exported belongs to it
GOAL = 0.02

_numbers = itertools.count(1)


class _Collector(ThreadingHTTPServer):
    """Takes what comes and looks at none of it: its work would be counted as the gateway's."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.taken_bytes = 0
        Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: _Collector

    def do_POST(self) -> None:
        size_bytes = int(self.headers["Content-Length"])
        self.rfile.read(size_bytes)
        self.server.taken_bytes += size_bytes
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """A line for each would be noise."""


def run() -> None:
    collector = _Collector()
    rng = random.Random(5)
    rates: dict[bool, list[float]] = {False: [], True: []}
    cpu_s: dict[bool, list[float]] = {False: [], True: []}
    with System(OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, BATCH_PROCESSORS="0") as system:
        gateway = system.processes()["gunicorn child"]
        _tokens_per_s(system.url, rng, traced=True)
        time.sleep(SETTLE_S)
        for turn in range(2 * TURNS):
            traced = turn % 4 in (1, 2)  # off on, on off: what drifts, drifts for both
            taken_bytes, used_s = collector.taken_bytes, sum(gateway.cpu_times()[:2])
            rates[traced].append(_tokens_per_s(system.url, rng, traced))
            time.sleep(SETTLE_S)
            cpu_s[traced].append(sum(gateway.cpu_times()[:2]) - used_s)
            assert (collector.taken_bytes > taken_bytes) is traced
        noted = _noted(Redis.from_url(system.redis_url))
    costs = [1 - on / off for off, on in zip(rates[False], rates[True])]
    export_s = statistics.median(cpu_s[True]) - statistics.median(cpu_s[False])
    turn_s = len(os.sched_getaffinity(0)) * STREAMS * TOKENS / statistics.median(rates[False])
    show(
        f"{STREAMS} streams of {PROMPT_TOKENS} + {TOKENS} tokens, {TURNS} turns of each kind",
        ("what", "goal", "found"),
        [
            ("tokens/s, not traced, median", "", statistics.median(rates[False])),
            ("tokens/s, all traced, median", "", statistics.median(rates[True])),
            ("cost, % of tokens/s, median of pairs", f"≤ {100 * GOAL:g}", 100 * statistics.median(costs)),
            ("its standard error, %", "", 100 * statistics.stdev(costs) * 1.25 / TURNS**0.5),
            ("CPU of the gateway for a trace, ms", "", 1e3 * export_s / STREAMS),
            ("so of all cores while it ran, %", f"≤ {100 * GOAL:g}", 100 * export_s / turn_s),
            ("bytes of a timeline in Redis", "", noted),
        ],
    )
    collector.shutdown()


def _tokens_per_s(url: str, rng: random.Random, traced: bool) -> float:
    prompts = [client.random_prompt(rng, PROMPT_TOKENS) for _ in range(STREAMS)]

    def one(prompt: list[int]) -> None:
        with client.connect(url) as http:
            http.headers["traceparent"] = f"00-{next(_numbers):032x}-{1:016x}-{int(traced):02x}"
            client.stream(http, prompt, TOKENS)

    began = time.perf_counter()
    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(one, prompts))
    return STREAMS * TOKENS / (time.perf_counter() - began)


def _noted(server: "Redis[bytes]") -> float:
    """What a timeline takes of the server's memory, on average."""
    sizes: list[Any] = [server.memory_usage(key) for key in server.scan_iter("kvr:*:timeline:*")]
    return statistics.mean(sizes)


if __name__ == "__main__":
    print(machine.name())
    run()
