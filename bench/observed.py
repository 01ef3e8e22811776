"""What it costs to be seen, side by side: one system under the same load all the time, which is switched each
few seconds between counting nothing, metrics, and metrics with every request traced, in random order. What is
on is done ten times over, and a tenth of its cost is told: once is less than this can tell from noise."""

import bisect
import random
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import httpx
import psutil
from prometheus_client import CollectorRegistry
from redis import Redis

from app.measure.table import show
from bench import client, machine
from bench.seen.switch import SCRAPE_EVERY_S, TIMES, Seen, Switch
from relay.settings import Settings
from workers.meters import Meters

STREAMS, PROMPT_TOKENS, TOKENS = 8, 64, 48
BLOCKS = 6  # each has every kind once
SETTLE_S = 2.5  # at least
EXPORT_S = 1.2  # after which a gateway has looked for traces
WINDOW_S = 4.0
SCRAPES = 200  # of an idle worker's page
IDLE_S = 3.0
COUNTED = 100_000
GOAL = 0.02


class Window(NamedTuple):
    """One kind of one block: tokens per second that clients read, CPU of all serving processes per token."""

    tokens_per_s: float
    cpu_ms: float


class Load:
    """Clients that ask again as soon as they have their answer. As a context manager."""

    def __init__(self, switch: Switch) -> None:
        self._switch = switch
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(STREAMS)]
        self._came: list[list[float]] = [[] for _ in self._threads]
        self._failed: list[BaseException] = []

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def came(self) -> list[float]:
        """When each token came, by the wall clock; complete when the clients have ended."""
        if self._failed:
            raise self._failed[0]
        return sorted(at for own in self._came for at in own)

    def _ask(self, number: int) -> None:
        rng = random.Random(number)
        try:
            with client.connect(self._switch.system.url) as http:
                while not self._stopping.is_set():
                    http.headers["traceparent"] = self._switch.traceparent()
                    prompt = client.random_prompt(rng, PROMPT_TOKENS)
                    self._came[number] += client.stream(http, prompt, TOKENS).at
        except BaseException as error:
            self._failed.append(error)


def run() -> None:
    rng = random.Random(time.time_ns())
    blocks: list[dict[Seen, tuple[float, float, float]]] = []
    with Switch() as switch:
        processes = list(switch.system.processes().values())
        with Load(switch) as load:
            time.sleep(SETTLE_S)
            for _ in range(BLOCKS):
                blocks.append({})
                for seen in rng.sample(list(Seen), len(Seen)):
                    blocks[-1][seen] = _watch(switch, seen, processes)
        came = load.came()
        windows = [{seen: _window(came, *block[seen]) for seen in Seen} for block in blocks]
        scrape_s = _cpu_of_a_scrape(switch.system.processes()["decode-1"], switch.pages["decode"])
        noted_bytes = _noted(Redis.from_url(switch.system.redis_url))
    for block in windows:
        print("  ".join(f"{block[seen].tokens_per_s:.1f} {block[seen].cpu_ms:.4f}" for seen in Seen))
    rows: list[tuple[object, ...]] = [
        (seen.value, *map(statistics.median, zip(*(block[seen] for block in windows)))) for seen in Seen
    ]
    show(
        f"{STREAMS} streams of {PROMPT_TOKENS} + {TOKENS} tokens, {BLOCKS} turns of {WINDOW_S:g} s of each",
        (f"on, {TIMES} times over", "tokens/s", "CPU ms per token"),
        rows,
    )
    show(
        f"Cost of it once, % (goal: ≤ {100 * GOAL:g} of tokens/s), from pairs of neighbours",
        ("of", "tokens/s", "±", "CPU per token", "±"),
        [(seen.value, *costs(windows, seen)) for seen in (Seen.METRICS, Seen.ALL)],
    )
    show(
        "Parts",
        ("what", "found"),
        [
            ("CPU of a decode worker for a scrape, ms", 1e3 * scrape_s),
            (f"so of its core, scraped each {SCRAPE_EVERY_S:g} s, %", 100 * scrape_s / SCRAPE_EVERY_S),
            ("counting a token, µs", 1e6 * _counting_s()),
            ("bytes of a timeline in Redis", noted_bytes),
        ],
    )


def costs(windows: Sequence[dict[Seen, Window]], seen: Seen) -> tuple[float, float, float, float]:
    """Percent of tokens/s and of CPU per token, of each mean and standard error, for what is done once."""
    slower = [100 * (1 - w[seen].tokens_per_s / w[Seen.NOTHING].tokens_per_s) for w in windows]
    dearer = [100 * (w[seen].cpu_ms / w[Seen.NOTHING].cpu_ms - 1) for w in windows]
    return (*_mean(slower), *_mean(dearer))


def _mean(values: Sequence[float]) -> tuple[float, float]:
    return statistics.mean(values) / TIMES, statistics.stdev(values) / len(values) ** 0.5 / TIMES


def _watch(switch: Switch, seen: Seen, processes: list[psutil.Process]) -> tuple[float, float, float]:
    """Begin and end of a window by the wall clock, and CPU seconds of all processes in it."""
    switch.to(seen)
    _settle(switch, seen)
    before = switch.scraped_bytes, switch.collector.taken_bytes
    began, cpu_s = time.time(), _cpu_s(processes)
    time.sleep(WINDOW_S)
    used_s, ended = _cpu_s(processes) - cpu_s, time.time()
    after = switch.scraped_bytes, switch.collector.taken_bytes
    assert (after[0] > before[0]) is (seen is not Seen.NOTHING)
    assert (after[1] > before[1]) is (seen is Seen.ALL)
    return began, ended, used_s


def _settle(switch: Switch, seen: Seen) -> None:
    """Wait until requests of the kind before have ended, and their traces have left."""
    taken_bytes = -1
    time.sleep(SETTLE_S - EXPORT_S)
    while taken_bytes != switch.collector.taken_bytes:
        taken_bytes = switch.collector.taken_bytes
        time.sleep(EXPORT_S)
        if seen is Seen.ALL:
            return


def _window(came: list[float], began: float, ended: float, cpu_s: float) -> Window:
    tokens = bisect.bisect(came, ended) - bisect.bisect(came, began)
    return Window(tokens / (ended - began), 1e3 * cpu_s / tokens)


def _cpu_s(processes: list[psutil.Process]) -> float:
    """By the scheduler's clock of each process, in nanoseconds: /proc counts in ticks of ten milliseconds."""
    return sum(time.clock_gettime(~process.pid << 3 | 2) for process in processes)


def _cpu_of_a_scrape(worker: psutil.Process, page: str) -> float:
    """Seconds of CPU, beyond what the worker takes when it is idle and nobody asks."""

    def used(scrapes: int) -> float:
        before, began = _cpu_s([worker]), time.perf_counter()
        with httpx.Client() as http:
            for _ in range(scrapes):
                http.get(page).raise_for_status()
        time.sleep(max(0.0, IDLE_S - (time.perf_counter() - began)))
        return _cpu_s([worker]) - before

    return (used(SCRAPES) - used(0)) / SCRAPES


def _counting_s() -> float:
    """Seconds that a worker's output thread spends on counting one token."""
    meters = Meters(Settings(role="decode"), CollectorRegistry())
    began = time.perf_counter()
    for _ in range(COUNTED):
        meters.emitted(1, 0.01)
    return (time.perf_counter() - began) / COUNTED


def _noted(server: Redis) -> float:
    """What a timeline takes of the server's memory, on average."""
    sizes: list[Any] = [server.memory_usage(key) for key in server.scan_iter("kvr:*:timeline:*")]
    return statistics.mean(sizes)


if __name__ == "__main__":
    print(machine.name())
    run()
