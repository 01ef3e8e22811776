"""What a request and a token take of the CPU, by process, and what all of them take while nothing runs.

The busiest thread of a worker is its engine's: the model's own computation, and a little around it.
"""

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import NamedTuple

import psutil

from app.measure.table import show
from bench import client
from bench.system import System

PROMPT_TOKENS = 16
CLIENTS, ROUNDS = 8, 20
TOKENS = 32  # of the longer answers, beyond the first
IDLE_S = 15.0
WORKERS = ("prefill-1", "decode-1")


class Cost(NamedTuple):
    """CPU milliseconds: of a whole process, and of each thread by its id."""

    all_ms: float
    threads_ms: Mapping[int, float]


def run() -> None:
    with System(PREFILL_WORKERS="1", DECODE_WORKERS="1") as system:
        _serve(system.url, 1, seed=0)
        short = _during(system, lambda: _serve(system.url, 1, seed=1))
        long = _during(system, lambda: _serve(system.url, 1 + TOKENS, seed=2))
        time.sleep(2.0)
        idle = _during(system, lambda: time.sleep(IDLE_S))
    rows: list[tuple[object, ...]] = []
    for name in sorted(short, key=lambda name: -short[name].all_ms):
        rows.append((name, *_per(*(costs[name].all_ms for costs in (short, long, idle)))))
        if name in WORKERS:
            busiest = max(long[name].threads_ms, key=lambda thread: long[name].threads_ms[thread])
            engine = (costs[name].threads_ms.get(busiest, 0.0) for costs in (short, long, idle))
            rows.append(("  of it engine", *_per(*engine)))
    show(
        f"CPU ms by process: {CLIENTS} clients, {PROMPT_TOKENS} tokens in, 1 or {1 + TOKENS} out",
        ("process", "a request of 1 token", "a further token", "a second, idle"),
        rows,
    )


def _per(short_ms: float, long_ms: float, idle_ms: float) -> tuple[float, float, float]:
    """Per request, per token after the first, per second."""
    requests = CLIENTS * ROUNDS
    return short_ms / requests, max(0.0, long_ms - short_ms) / (requests * TOKENS), idle_ms / IDLE_S


def _during(system: System, what: Callable[[], object]) -> dict[str, Cost]:
    processes = system.processes() | {"this client": psutil.Process()}
    before = {name: (_cpu_ms(process), _threads(process)) for name, process in processes.items()}
    what()
    costs = {}
    for name, process in processes.items():
        all_ms, threads_ms = before[name]
        threads = {thread: ms - threads_ms.get(thread, 0.0) for thread, ms in _threads(process).items()}
        costs[name] = Cost(_cpu_ms(process) - all_ms, threads)
    return costs


def _cpu_ms(process: psutil.Process) -> float:
    """Also of threads that have ended."""
    times = process.cpu_times()
    return float(1e3 * (times.user + times.system))


def _threads(process: psutil.Process) -> dict[int, float]:
    found = {}
    for name in os.listdir(f"/proc/{process.pid}/task"):
        try:
            with open(f"/proc/{process.pid}/task/{name}/schedstat") as file:
                found[int(name)] = int(file.read().split()[0]) / 1e6
        except OSError:  # it has ended
            continue
    return found


def _serve(url: str, tokens: int, seed: int) -> None:
    def one(number: int) -> None:
        rng = Random(1000 * seed + number)
        with client.connect(url) as http:
            for _ in range(ROUNDS):
                client.stream(http, client.random_prompt(rng, PROMPT_TOKENS), tokens)

    with ThreadPoolExecutor(CLIENTS) as threads:
        list(threads.map(one, range(CLIENTS)))


if __name__ == "__main__":
    run()
