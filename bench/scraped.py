"""What it costs to be scraped each second, by every process: tokens per second with and without, in turns.

Counting goes on in both, since it cannot be turned off; what that takes is measured apart.
"""

import random
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import psutil
from prometheus_client import CollectorRegistry

from app.measure.completion import complete
from app.measure.table import show
from bench import client
from bench.system import System, free_port
from relay.settings import Settings
from workers.meters import Meters

STREAMS, PROMPT_TOKENS, TOKENS = 8, 32, 160
TURNS = 20  # of each kind, after one that is not counted
SCRAPES = 200  # of each page of an idle worker
EVERY_S = 1.0
IDLE_S = 5.0
COUNTED = 100_000
GOAL = 0.02


def run() -> None:
    model = Settings.from_env().model_name
    rng = random.Random(5)
    turns: list[float] = []
    with System(METRICS_PORT=str(free_port()), BATCH_PROCESSORS="0") as system:
        workers = {
            found["labels"]["__meta_kvrelay_role"]: f"http://{found['targets'][0]}/metrics"
            for found in httpx.get(f"{system.url}/metrics/targets").json()
        }
        assert set(workers) == {"prefill", "decode"}
        pages = [f"{system.url}/metrics", f"{system.url}/metrics/cluster", *workers.values()]
        _tokens_per_s(system.url, model, rng)
        for turn in range(2 * TURNS):
            scraped = _is_scraped(turn)
            with _scraping(pages if scraped else []) as scrapes:
                turns.append(_tokens_per_s(system.url, model, rng))
            assert bool(scrapes) is scraped
        cpu_s = _cpu_of_a_scrape(system.processes()["decode-1"], workers["decode"])
    off, on = ([rate for n, rate in enumerate(turns) if _is_scraped(n) is kind] for kind in (False, True))
    costs = [1 - b / a for a, b in zip(off, on)]
    show(
        f"{STREAMS} streams of {TOKENS} tokens, all scraped each {EVERY_S:g} s, {TURNS} turns of each",
        ("what", "goal", "found"),
        [
            ("tokens/s, not scraped, median", "", statistics.median(off)),
            ("tokens/s, scraped, median", "", statistics.median(on)),
            ("cost, % of tokens/s, median of pairs", f"≤ {100 * GOAL:g}", 100 * statistics.median(costs)),
            ("its standard error, %", "", 100 * statistics.stdev(costs) * 1.25 / TURNS**0.5),
            ("CPU of a decode worker for a scrape, ms", "", 1e3 * cpu_s),
            ("so of its core, each second, %", f"≤ {100 * GOAL:g}", 100 * cpu_s / EVERY_S),
            ("counting a token, µs", "", 1e6 * _counting_s()),
        ],
    )


def _tokens_per_s(url: str, model: str, rng: random.Random) -> float:
    prompts = [client.random_prompt(rng, PROMPT_TOKENS) for _ in range(STREAMS)]
    began = time.perf_counter()
    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(lambda prompt: complete(url, model, prompt, TOKENS), prompts))
    return STREAMS * TOKENS / (time.perf_counter() - began)


@contextmanager
def _scraping(pages: list[str]) -> Iterator[list[int]]:
    """Meanwhile all pages are fetched again and again. The sizes of what came."""
    stop, sizes = threading.Event(), list[int]()

    def scrape() -> None:
        with httpx.Client() as http:
            while pages and not stop.is_set():
                sizes.extend(len(http.get(page).raise_for_status().content) for page in pages)
                stop.wait(EVERY_S)

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield sizes
    finally:
        stop.set()
        thread.join()


def _is_scraped(turn: int) -> bool:
    """Off on, on off: what drifts, drifts for both."""
    return turn % 4 in (1, 2)


def _cpu_of_a_scrape(worker: psutil.Process, page: str) -> float:
    """Seconds of CPU, beyond what the worker takes when it is idle and nobody asks."""

    def used(scrapes: int) -> float:
        before, began = sum(worker.cpu_times()[:2]), time.perf_counter()
        with httpx.Client() as http:
            for _ in range(scrapes):
                http.get(page).raise_for_status()
        time.sleep(max(0.0, IDLE_S - (time.perf_counter() - began)))
        return sum(worker.cpu_times()[:2]) - before

    return (used(SCRAPES) - used(0)) / SCRAPES


def _counting_s() -> float:
    """Seconds that a worker's output thread spends on counting one token."""
    meters = Meters(Settings(role="decode"), CollectorRegistry())
    began = time.perf_counter()
    for _ in range(COUNTED):
        meters.emitted(1, 0.01)
    return (time.perf_counter() - began) / COUNTED


if __name__ == "__main__":
    run()
