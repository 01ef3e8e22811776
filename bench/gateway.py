"""What the gateway adds: to a request until it is recorded, and to each token on its way to the client.

Streams of one request at a time and of eight, beside a reader that follows the same requests in Redis.
"""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from app.measure.table import middle, percentile, show
from bench import client
from bench.system import System
from relay.rooms import Rooms
from relay.token_feed import TokenFeed

REQUESTS, PROMPT_TOKENS, TOKENS = 40, 32, 64
BLOCK_MS = 50


def run() -> None:
    with System(SERVED_NAME="bench") as system:
        rows = [_row(system, at_once) for at_once in (1, 8)]
    show(
        "Added by the gateway, ms: until a request is recorded; a token, client behind a direct reader",
        ("at once", "request, median", "p99", "token, median", "p99"),
        rows,
    )


def _row(system: System, at_once: int) -> tuple[object, ...]:
    rooms, reader = Rooms(system.redis_url, "bench"), Reader(system.redis_url)
    rng = random.Random(at_once)
    prompts = [client.random_prompt(rng, PROMPT_TOKENS) for _ in range(REQUESTS)]
    recorded_ms: list[float] = []
    behind_ms: list[float] = []

    def one(prompt: list[int]) -> None:
        with client.connect(system.url) as http:
            http.get("/ping")  # the connection is there
            body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            sent = time.time()
            request_id: str = _json(http.post("/v1/requests", json=body))["id"]
            reader.follow(request_id)
            record = rooms.record(request_id)
            assert record
            recorded_ms.append(record.timings.submitted - 1000 * sent)
            with http.stream("GET", f"/v1/requests/{request_id}/stream") as response:
                seen = [time.perf_counter() for line in response.iter_lines() if '"position"' in line]
        direct = reader.seen(request_id)
        behind_ms.extend(1000 * (a - b) for a, b in zip(seen[1:], direct[1:], strict=True))

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, prompts))
    reader.close()
    rooms.close()
    return (
        at_once,
        *(value for each in (recorded_ms, behind_ms) for value in (middle(each), percentile(each, 0.99))),
    )


class Reader:
    """Follows requests in Redis on a thread of its own, and notes when each token came."""

    def __init__(self, url: str) -> None:
        self._feed = TokenFeed(url, "bench")
        self._at: dict[str, int] = {}
        self._seen: dict[str, list[float]] = {}
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._closing = False
        self._thread.start()

    def follow(self, request_id: str) -> None:
        with self._changed:
            self._at[request_id], self._seen[request_id] = 0, []
            self._changed.notify_all()
        self._feed.wake()

    def seen(self, request_id: str) -> list[float]:
        """When each token came, once the last one has."""
        with self._changed:
            self._changed.wait_for(lambda: request_id not in self._at)
            return self._seen[request_id]

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._feed.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._at) or self._closing)
                if self._closing:
                    return
                positions = dict(self._at)
            chunks = self._feed.wait(positions, BLOCK_MS)
            now = time.perf_counter()
            with self._changed:
                for request_id, chunk in chunks.items():
                    self._seen[request_id] += [now] * len(chunk.tokens)
                    self._at[request_id] += len(chunk.tokens)
                    if chunk.end:
                        del self._at[request_id]
                self._changed.notify_all()


def _json(reply: httpx.Response) -> dict[str, Any]:
    return dict(reply.raise_for_status().json())


if __name__ == "__main__":
    run()
