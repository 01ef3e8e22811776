"""Chats of several turns under one system prompt: what is relayed when the decode worker has most of it."""

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import httpx

from app.measure.table import middle, percentile, show
from bench import client
from bench.system import System

CLIENTS, TURNS = 8, 4
SYSTEM_TOKENS, USER_TOKENS, ANSWER_TOKENS = 1_000, 60, 64
LOOK_S = 0.2


class Turn(NamedTuple):
    """`spared` bytes were not sent, since the decode worker had them."""

    first_s: float
    sent: int
    spared: int


def run() -> None:
    with System() as system, client.connect(system.url) as http, held_pages(http) as held:
        rng = random.Random(11)
        begin = client.random_prompt(rng, SYSTEM_TOKENS)
        seeds = [rng.random() for _ in range(CLIENTS)]
        started = time.monotonic()
        with ThreadPoolExecutor(CLIENTS) as pool:
            chats = list(pool.map(lambda seed: _chat(http, begin, random.Random(seed)), seeds))
        seconds = time.monotonic() - started
    rows: list[tuple[object, ...]] = []
    for number, turns in enumerate(zip(*chats), start=1):
        first_s = [turn.first_s for turn in turns]
        sent = sum(turn.sent for turn in turns) / CLIENTS / 1e6
        spared = sum(turn.spared for turn in turns) / CLIENTS / 1e6
        rows.append((f"turn {number}", middle(first_s), percentile(first_s, 0.99), sent, spared))
    show(
        f"{CLIENTS} chats under {SYSTEM_TOKENS} tokens, {USER_TOKENS} + {ANSWER_TOKENS} a turn: "
        f"{seconds:.1f} s, {sum(turn.sent for chat in chats for turn in chat) / 1e6:.0f} MB relayed, "
        f"at most {max(held)} pages held",
        ("", "TTFT s", "p99", "MB sent a request", "spared"),
        rows,
    )


def _chat(http: httpx.Client, begin: list[int], rng: random.Random) -> list[Turn]:
    turns, prompt = [], begin
    for _ in range(TURNS):
        prompt = prompt + client.random_prompt(rng, USER_TOKENS)
        answer = client.stream(http, prompt, ANSWER_TOKENS)
        transfer = client.record(http, answer.request_id)["ledger"]["transfer"]
        turns.append(Turn(answer.first_s, transfer["bytes"], transfer["spared_bytes"]))
        prompt = prompt + answer.tokens
    return turns


@contextmanager
def held_pages(http: httpx.Client) -> Iterator[list[int]]:
    """Pages that the decode worker holds, every LOOK_S."""
    held, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            workers = http.get("/v1/pools").raise_for_status().json()["workers"]
            held.append(sum(worker["pages"]["held"] for worker in workers if worker["role"] == "decode"))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield held
    finally:
        over.set()
        thread.join()


if __name__ == "__main__":
    run()
