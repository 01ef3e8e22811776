"""Clients that always have a request open, and keep account of what they were answered."""

import json
import random
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPException
from typing import Any, NamedTuple

from app.commands.api_client import ApiAway, ApiClient

CLIENTS = 10
PROMPTS = 20
MAX_TOKENS = 40
ANSWERED_S = 180.0
WORDS = (
    "river", "engine", "window", "small", "green", "letter", "morning", "teacher", "running", "under",
    "yesterday", "before", "seven", "bright", "kitchen", "question", "because", "paper", "silent", "north",
)  # fmt: skip
AWAY = (ApiAway, OSError, HTTPException, ValueError)  # a connection that ends within an answer


class Answer(NamedTuple):
    """What a client has read of one request."""

    status: str
    text: str
    finish_reason: str | None
    completion_tokens: int


def bodies(seed: int) -> list[dict[str, Any]]:
    """Greedy requests whose prompts have about 30 to 200 tokens."""
    draw = random.Random(seed)
    prompts = (" ".join(draw.choices(WORDS, k=draw.randint(10, 150))) for _ in range(PROMPTS))
    return [
        {
            "messages": [{"role": "user", "content": f"Write a story with: {words}."}],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
        }
        for words in prompts
    ]


def answer(client: ApiClient, body: dict[str, Any], key: str, streamed: bool) -> tuple[str, Answer]:
    """Submit under `key` and read to the end, however often that takes. The request's id, and the answer."""
    deadline = time.monotonic() + ANSWERED_S
    request_id = str(
        _again(lambda: client.post("/v1/requests", body, **{"Idempotency-Key": key}), deadline)["id"]
    )
    if streamed:
        return request_id, _followed(client, request_id, deadline)
    path = f"/v1/requests/{request_id}?wait=10"
    while (record := _again(lambda: client.get(path), deadline))["status"] not in (
        "finished",
        "failed",
        "cancelled",
    ):
        assert time.monotonic() < deadline, f"{request_id} is {record['status']} after {ANSWERED_S:g} s"
    return request_id, _answer(record, record["text"])


def _answer(end: dict[str, Any], text: str) -> Answer:
    return Answer(end["status"], text, end["finish_reason"], end["usage"]["completion_tokens"])


def _again(call: Any, deadline: float) -> dict[str, Any]:
    while True:
        try:
            found: dict[str, Any] = call()
            return found
        except AWAY as error:
            if time.monotonic() > deadline:
                raise AssertionError("nobody answers") from error
            time.sleep(0.2)


def _followed(client: ApiClient, request_id: str, deadline: float) -> Answer:
    """Resume behind the last token after each break. Raises AssertionError if one is lost or doubled."""
    text, position = "", 0
    while True:
        try:
            for name, data in _events(client, request_id, position):
                assert name != "error", f"{request_id}: {data}"
                if name == "end":
                    return _answer(data, text + data["text"])
                assert data["position"] == position, f"{request_id}: {data} after {position} tokens"
                text, position = text + data["text"], position + 1
        except AWAY:
            time.sleep(0.2)
        assert time.monotonic() < deadline, f"{request_id} is open after {ANSWERED_S:g} s"


def _events(client: ApiClient, request_id: str, after: int) -> Iterator[tuple[str, dict[str, Any]]]:
    with urllib.request.urlopen(
        f"{client.base_url}/v1/requests/{request_id}/stream?after={after}", timeout=30
    ) as lines:
        name = ""
        for line in lines:
            field, _, value = line.decode().rstrip("\n").partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                yield name, json.loads(value)
                name = ""


class Load:
    """Runs until `stop`."""

    def __init__(self, client: ApiClient, seed: int) -> None:
        self._client = client
        self._bodies = bodies(seed)
        self._expected = self._undisturbed()
        self._ids: Counter[str] = Counter()
        self._problems: list[str] = []
        self._next = 0
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(n % 2 == 0,), daemon=True) for n in range(CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def answered(self) -> int:
        return self._ids.total()

    def check(self) -> None:
        """Raises AssertionError for whatever was lost, doubled or told differently until now."""
        doubled = [request_id for request_id, times in self._ids.copy().items() if times > 1]
        problems = self._problems + [f"{request_id} answers several submits" for request_id in doubled]
        assert not problems, "\n".join(problems)

    def stop(self) -> int:
        """Wait for the last answers, and check. How many requests were answered."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self.check()
        return self.answered

    def _undisturbed(self) -> list[Answer]:
        answers = [
            answer(self._client, body, f"undisturbed-{n}", n % 2 == 0)[1]
            for n, body in enumerate(self._bodies)
        ]
        assert all(each.status == "finished" for each in answers), answers
        return answers

    def _run(self, streamed: bool) -> None:
        while not self._stopping.is_set():
            with self._lock:
                number, self._next = self._next, self._next + 1
            which = number % len(self._bodies)
            try:
                request_id, found = answer(self._client, self._bodies[which], f"load-{number}", streamed)
            except Exception as error:
                self._problems.append(f"request {number}: {type(error).__name__}: {error}")
                continue
            self._ids[request_id] += 1
            if found != self._expected[which]:
                self._problems.append(
                    f"request {number}, {request_id}: {found} instead of {self._expected[which]}"
                )
