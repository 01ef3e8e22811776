"""Many requests in a row, some cancelled, workers killed: does everything come back to where it was?"""

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
from prometheus_client.parser import text_string_to_metric_families

from app.measure.table import show
from bench import client, machine
from bench.system import System

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "2000"))
CANCELLED_SHARE = 0.05
KILL_EVERY = 200
CLIENTS = 8
WARM_UP_REQUESTS = 100
SETTLE_S = 60.0
WORKERS = 4
CARD_TTL_S = 11.0


def run() -> None:
    with System(PREFILL_WORKERS="2", DECODE_WORKERS="2", KV_POOL_MB="128", RESULT_TTL_S="10") as system:
        soak = Soak(system)
        soak.load(WARM_UP_REQUESTS, kills=False)
        before, memory = soak.settled_pages(), soak.memory_mb()
        soak.outcomes.clear()
        started = time.monotonic()
        soak.load(REQUESTS, kills=True)
        seconds = time.monotonic() - started
        after, memory_after = soak.settled_pages(), soak.memory_mb()
    show(
        f"{REQUESTS} requests, {soak.kills} workers killed, {seconds:.0f} s, outcomes {soak.outcomes}",
        ("process", "MB before", "MB after"),
        [(name, memory.get(name, float("nan")), memory_after[name]) for name in sorted(memory_after)],
    )
    show(
        "KV pages when idle (goal: as before, none held, none in quarantine)",
        ("worker", "held before", "held after", "quarantined after", "free and cached before", "after"),
        [
            (
                name,
                before[name]["held"],
                pages["held"],
                pages["quarantined"],
                before[name]["free"] + before[name]["cached"],
                pages["free"] + pages["cached"],
            )
            for name, pages in sorted(after.items())
        ],
    )


class Soak:
    def __init__(self, system: System) -> None:
        self._system = system
        self._rng = random.Random(5)
        self._lock = threading.Lock()
        self.kills = 0
        self.outcomes: dict[str, int] = {}

    def load(self, requests: int, kills: bool) -> None:
        plans = [
            (self._rng.randrange(8, 120), self._rng.randrange(4, 16), self._rng.random())
            for _ in range(requests)
        ]
        done = 0
        with ThreadPoolExecutor(CLIENTS) as threads:
            for outcome in threads.map(self._one, plans):
                with self._lock:
                    self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
                done += 1
                if kills and done % KILL_EVERY == 0:
                    self._kill()

    def _one(self, plan: tuple[int, int, float]) -> str:
        prompt_tokens, max_tokens, chance = plan
        rng = random.Random(chance)
        body = {
            "prompt": client.random_prompt(rng, prompt_tokens),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        with client.connect(self._system.url) as http:
            request_id = _accepted(http, body)
            if chance < CANCELLED_SHARE:
                time.sleep(rng.random() * 0.5)
                http.delete(f"/v1/requests/{request_id}").raise_for_status()
            while True:
                reply = http.get(f"/v1/requests/{request_id}", params={"wait": 30}).json()
                if reply["status"] in ("finished", "failed", "cancelled"):
                    return str(reply["status"])

    def _kill(self) -> None:
        """SIGKILL a worker, prefill and decode in turns; the launcher starts the next incarnation."""
        role = ("decode", "prefill")[self.kills % 2]
        victims = {
            name: process for name, process in self._system.processes().items() if name.startswith(role)
        }
        if victims:
            victims[self._rng.choice(sorted(victims))].send_signal(signal.SIGKILL)
            self.kills += 1

    def settled_pages(self) -> dict[str, dict[str, float]]:
        """Pages by worker and state, once all workers are back and idle."""
        time.sleep(CARD_TTL_S)  # until then the cards of killed workers are still shown
        deadline = time.monotonic() + SETTLE_S
        while True:
            pages = self._pages()
            idle = all(states["held"] == states["quarantined"] == 0 for states in pages.values())
            if (len(pages) == WORKERS and idle) or time.monotonic() > deadline:
                return pages
            time.sleep(1)

    def memory_mb(self) -> dict[str, float]:
        return {name: process.memory_info().rss / 1e6 for name, process in self._system.processes().items()}

    def _pages(self) -> dict[str, dict[str, float]]:
        pages: dict[str, dict[str, float]] = {}
        text = httpx.get(f"{self._system.url}/metrics/cluster").text
        for family in text_string_to_metric_families(text):
            for sample in family.samples if family.name == "kvrelay_worker_pages" else ():
                pages.setdefault(sample.labels["worker"], {})[sample.labels["state"]] = sample.value
        return pages


def _accepted(http: httpx.Client, body: dict[str, object]) -> str:
    """The id, however long both workers of a pool are down."""
    while True:
        reply = http.post("/v1/requests", json=body)
        if reply.status_code == 202:
            return str(reply.json()["id"])
        if reply.status_code not in (429, 503):
            reply.raise_for_status()
        time.sleep(0.5)


if __name__ == "__main__":
    print(machine.name())
    run()
