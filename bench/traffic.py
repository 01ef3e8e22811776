"""What Redis is asked per token: commands of clients, and bytes both ways, while eight streams run.

Calls inside server-side functions are not counted: they cost no way there and back.
"""

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
from redis import Redis
from redis.exceptions import RedisError

from app.measure.table import show
from bench import client
from bench.system import System

STREAMS, PROMPT_TOKENS, TOKENS = 8, 64, 320
WINDOW_S = 3.0
GOAL = 0.2
_LINE = re.compile(rb'[0-9.]+ \[[0-9]+ (\S+)\] "([^"]*)"(?: "([^"]*)")?')


def run() -> None:
    with System() as system, client.connect(system.url) as http:
        server = Redis.from_url(system.redis_url)
        _serve(http)
        idle = Counter[str]()
        with counting(system.redis_url, idle):
            time.sleep(WINDOW_S)
        before: Any = server.info("stats")
        began = time.monotonic()
        _serve(http)
        seconds = time.monotonic() - began
        after: Any = server.info("stats")
        whole, steady = Counter[str](), Counter[str]()
        with counting(system.redis_url, whole):
            _serve(http)
        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(_serve, http)
            while min(_tokens(http)) < 8 or max(_tokens(http)) > TOKENS // 2:  # old ones, or not all there
                time.sleep(0.05)
            decoded = -sum(_tokens(http))
            with counting(system.redis_url, steady):
                time.sleep(WINDOW_S)
            decoded += sum(_tokens(http))
            assert max(_tokens(http)) < TOKENS, "one ended too early: take more tokens"
            served.result()
    tokens = STREAMS * TOKENS
    names = [name for name, _ in whole.most_common(12)]
    rows: list[tuple[object, ...]] = [
        ("all", steady.total() / decoded, f"≤ {GOAL}", whole.total() / STREAMS, idle.total() / WINDOW_S),
        *((name, steady[name] / decoded, "", whole[name] / STREAMS, idle[name] / WINDOW_S) for name in names),
    ]
    show(
        f"Redis: {STREAMS} streams of {PROMPT_TOKENS} + {TOKENS} tokens, {tokens / seconds:.0f} tokens/s",
        ("commands", "per token, all decode", "goal", "per request", "per second, idle"),
        rows,
    )
    sent, received = (
        after[f"total_net_{way}_bytes"] - before[f"total_net_{way}_bytes"] for way in ("input", "output")
    )
    show("Bytes per token", ("to Redis", "from Redis"), [(sent / tokens, received / tokens)])


def _tokens(http: httpx.Client) -> list[int]:
    """Of the latest requests."""
    records = http.get("/v1/requests", params={"limit": STREAMS}).raise_for_status().json()["data"]
    return [record["usage"]["completion_tokens"] for record in records]


@contextmanager
def counting(url: str, found: Counter[str]) -> Iterator[None]:
    """Count what clients send meanwhile, by command, and functions by name."""
    watcher = Redis.from_url(url)
    connection: Any = watcher.connection_pool.get_connection()
    connection.send_command("MONITOR")
    connection.read_response()

    def read() -> None:
        try:
            while True:
                line = _LINE.match(connection.read_response())
                if line is None or line[1] == b"lua":
                    continue
                command, function = line[2], line[3]
                found[(function if command.lower().startswith(b"fcall") else command.lower()).decode()] += 1
        except (RedisError, ValueError, OSError):
            return  # disconnected: it is over

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield
    finally:
        connection.disconnect()
        thread.join()


def _serve(http: httpx.Client) -> None:
    rng = random.Random(5)
    prompts = [client.random_prompt(rng, PROMPT_TOKENS) for _ in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(lambda prompt: client.stream(http, prompt, TOKENS), prompts))


if __name__ == "__main__":
    run()
