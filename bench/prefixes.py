"""Chats of several turns over two prefill workers: how much of a prompt its worker has, and what that spares,
with PREFIX_WAIT_MS as it is by default and without."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import httpx

from app.measure.table import middle, percentile, show
from bench import client
from bench.system import System

CHATS, TURNS, BEGINNINGS = 12, 5, 3
SYSTEM_TOKENS, FIRST_TOKENS, USER_TOKENS, ANSWER_TOKENS = 256, 400, 60, 32
PAGE_TOKENS = 16
CLIENTS = (2, 6)  # each has one chat after the other
WAYS: dict[str, dict[str, str]] = {"by prefix": {}, "by chance": {"PREFIX_WAIT_MS": "0"}}


class Turn(NamedTuple):
    """`known_tokens`: the whole pages of the prompt before it, which some worker has computed."""

    first_s: float
    prompt_tokens: int
    known_tokens: int
    cached_tokens: int


def run() -> None:
    rows: list[tuple[object, ...]] = []
    for clients in CLIENTS:
        for way, env in WAYS.items():
            with System(PREFILL_WORKERS="2", **env) as system, client.connect(system.url) as http:
                rows.append((clients, way, *_measured(http, clients)))
    show(
        f"Two prefill workers, {CHATS} chats of {TURNS} turns: {BEGINNINGS} beginnings of {SYSTEM_TOKENS}"
        f" tokens, {FIRST_TOKENS} more, then {USER_TOKENS} + {ANSWER_TOKENS} a turn. Turns after the first",
        ("clients", "", "at place", "cached", "of at most", "TTFT s", "p99", "all s"),
        rows,
    )


def _measured(http: httpx.Client, clients: int) -> tuple[float, ...]:
    rng = random.Random(3)
    beginnings = [client.random_prompt(rng, SYSTEM_TOKENS) for _ in range(BEGINNINGS)]
    chats = [(beginnings[number % BEGINNINGS], random.Random(rng.random())) for number in range(CHATS)]
    started = time.monotonic()
    with ThreadPoolExecutor(clients) as pool:
        turns = [turn for chat in pool.map(lambda chat: _chat(http, *chat), chats) for turn in chat[1:]]
    seconds = time.monotonic() - started
    whole = sum(turn.prompt_tokens for turn in turns)
    first_s = [turn.first_s for turn in turns]
    return (
        sum(turn.cached_tokens >= turn.known_tokens for turn in turns) / len(turns),
        sum(turn.cached_tokens for turn in turns) / whole,
        sum(turn.known_tokens for turn in turns) / whole,
        middle(first_s),
        percentile(first_s, 0.99),
        seconds,
    )


def _chat(http: httpx.Client, prompt: list[int], rng: random.Random) -> list[Turn]:
    turns: list[Turn] = []
    for number in range(TURNS):
        known = turns[-1].prompt_tokens // PAGE_TOKENS * PAGE_TOKENS if turns else 0
        prompt = prompt + client.random_prompt(rng, USER_TOKENS if number else FIRST_TOKENS)
        answer = client.stream(http, prompt, ANSWER_TOKENS)
        used = client.record(http, answer.request_id)["usage"]
        cached = used["prompt_tokens_details"]["cached_tokens"]
        turns.append(Turn(answer.first_s, len(prompt), known, cached))
        prompt = prompt + answer.tokens
    return turns


if __name__ == "__main__":
    run()
