"""A client that measures: one streamed completion at a time, on a thread of its own."""

import itertools
import json
import random
import time
from typing import Any, NamedTuple

import httpx

VOCABULARY = range(1000, 40_000)  # ordinary tokens of the default model


class Streamed(NamedTuple):
    """Seconds: to the first token, and between tokens; when (wall clock) each token came; their ids."""

    request_id: str
    first_s: float
    gaps_s: list[float]
    at: list[float]
    tokens: list[int]


def random_prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.choice(VOCABULARY) for _ in range(tokens)]


def stream(client: httpx.Client, prompt: list[int], max_tokens: int) -> Streamed:
    """Submit and read the token stream to its end."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    start = time.perf_counter()
    accepted = client.post("/v1/requests", json=body)
    accepted.raise_for_status()
    request_id = accepted.json()["id"]
    at: list[float] = []
    seen: list[float] = []
    told: list[str] = []
    with client.stream("GET", f"/v1/requests/{request_id}/stream") as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data:") and '"position"' in line:
                seen.append(time.perf_counter())
                at.append(time.time())
                told.append(line)
    if len(seen) != max_tokens:
        raise RuntimeError(f"{request_id} ended after {len(seen)} of {max_tokens} tokens")
    tokens = [json.loads(line.removeprefix("data:"))["token"] for line in told]
    return Streamed(request_id, seen[0] - start, [b - a for a, b in itertools.pairwise(seen)], at, tokens)


def record(client: httpx.Client, request_id: str) -> dict[str, Any]:
    reply = client.get(f"/v1/requests/{request_id}")
    reply.raise_for_status()
    return dict(json.loads(reply.text))


def connect(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=600)
