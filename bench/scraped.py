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
from itertools import pairwise

import httpx
from prometheus_client import CollectorRegistry

from bench import client
from bench.completion import complete
from bench.system import System, free_port
from bench.table import show
from relay.settings import Settings
from workers.meters import Meters

STREAMS, PROMPT_TOKENS, TOKENS = 8, 32, 160
TURNS = 7  # of each kind, after one that is not counted
EVERY_S = 1.0
COUNTED = 100_000
GOAL = 0.02


def run() -> None:
    model = Settings.from_env().model_name
    rng = random.Random(5)
    rates: dict[bool, list[float]] = {False: [], True: []}
    with System(METRICS_PORT=str(free_port()), BATCH_PROCESSORS="0") as system:
        pages = [f"{system.url}/metrics", f"{system.url}/metrics/cluster"]
        for found in httpx.get(f"{system.url}/metrics/targets").json():
            pages += [f"http://{target}/metrics" for target in found["targets"]]
        assert len(pages) == 4, pages
        _tokens_per_s(system.url, model, rng)
        for turn in range(2 * TURNS):
            scraped = turn % 4 in (1, 2)  # off on, on off: what drifts, drifts for both
            with _scraping(pages if scraped else []) as scrapes:
                rates[scraped].append(_tokens_per_s(system.url, model, rng))
            assert bool(scrapes) is scraped
    without, with_scrapes = (statistics.median(rates[kind]) for kind in (False, True))
    show(
        f"{STREAMS} streams of {TOKENS} tokens, all scraped each {EVERY_S:g} s, {TURNS} turns of each",
        ("what", "goal", "found"),
        [
            ("tokens/s, not scraped, median", "", without),
            ("tokens/s, scraped, median", "", with_scrapes),
            ("cost, % of tokens/s", f"≤ {100 * GOAL:g}", 100 * (1 - with_scrapes / without)),
            ("turns of one kind differ by, %", "", 100 * _spread(rates[False])),
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


def _spread(rates: list[float]) -> float:
    """The median of how far neighbours are apart."""
    return statistics.median(abs(a - b) / a for a, b in pairwise(rates))


def _counting_s() -> float:
    """Seconds that a worker's output thread spends on counting one token."""
    meters = Meters(Settings(role="decode"), CollectorRegistry())
    began = time.perf_counter()
    for _ in range(COUNTED):
        meters.emitted(1, 0.01)
    return (time.perf_counter() - began) / COUNTED


if __name__ == "__main__":
    run()
