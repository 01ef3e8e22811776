"""A streamed completion from any server that speaks the OpenAI API, read with as little work as Python can:
whoever measures on the cores that serve takes time from what it measures."""

import http.client
import itertools
import json
import time
from collections.abc import Generator
from contextlib import closing
from typing import Any, NamedTuple
from urllib.parse import urlsplit

TIMEOUT_S = 600


class Completed(NamedTuple):
    """Seconds: to the first chunk, and between chunks. A server may put several tokens into one chunk."""

    first_s: float
    gaps_s: list[float]


class Miscounted(RuntimeError):
    """The server used other numbers of tokens than it was asked for."""


class Refused(RuntimeError):
    """The server answered no stream, but `status` and `body`."""

    def __init__(self, url: str, status: int, body: bytes) -> None:
        super().__init__(f"{url} answers {status}: {body.decode(errors='replace')}")
        self.status = status
        self.body = body


def complete(url: str, model: str, prompt: list[int], max_tokens: int, key: str = "") -> Completed:
    """Read a completion of exactly `max_tokens` tokens to its end. Raises RuntimeError, and OSError."""
    start = time.perf_counter()
    at = list(chunks(url, model, prompt, max_tokens, key))
    return Completed(at[0] - start, [after - before for before, after in itertools.pairwise(at)])


def chunks(url: str, model: str, prompt: list[int], max_tokens: int, key: str = "") -> Generator[float]:
    """When each chunk with a token came, in seconds of `perf_counter`. Closing it cancels the request."""
    address = urlsplit(url)
    assert address.hostname is not None
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    with closing(kind(address.hostname, address.port, timeout=TIMEOUT_S)) as connection:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        connection.request("POST", f"{address.path}/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise Refused(url, response.status, response.read(2000))
        usage: dict[str, Any] = {}
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter()
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"{url} fails: {event['error']}")
            usage = event.get("usage") or usage
            if _has_token(event["choices"]):
                yield now
    counted = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    if counted != (len(prompt), max_tokens):
        raise Miscounted(f"{url} counts {counted}, asked for {(len(prompt), max_tokens)}")


def _has_token(choices: list[dict[str, Any]]) -> bool:
    """A last chunk without text only tells the reason of the end."""
    return any(choice["text"] or not choice["finish_reason"] for choice in choices)
