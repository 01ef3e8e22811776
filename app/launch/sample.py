"""One question over the public API, to show that everything works and where the time went."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import Any, NamedTuple

QUESTION = "Name three primary colors."
MAX_TOKENS = 32
_WAIT_S = 1
_PATIENCE_S = 300
_CALL_S = 10  # beyond the wait


class Sample(NamedTuple):
    """The record of the ended request, as the API shows it."""

    record: dict[str, Any]

    @property
    def answer(self) -> str:
        return str(self.record["text"]).strip()

    @property
    def timings(self) -> dict[str, str]:
        """Where the time went, leg by leg; what did not happen is left out."""
        ledger, usage = self.record["ledger"], self.record["usage"]
        transfer = ledger["transfer"] or {"exposed_ms": None, "bytes": 0}
        kv = f" beyond prefill, for {transfer['bytes'] // 1000} kB of KV"
        parts = {
            "queue": (ledger["queued"], ""),
            "prefill": (ledger["prefill"], f" for {usage['prompt_tokens']} tokens"),
            "transfer": (transfer["exposed_ms"], kv),
            "decode": (ledger["decode"], f" for {usage['completion_tokens']} tokens"),
            "total": (ledger["total"], ""),
        }
        return {name: f"{ms:7.1f} ms{what}" for name, (ms, what) in parts.items() if ms is not None}


class SampleFailed(Exception):
    """The question was not answered; the message says what the server said."""


def ask(base_url: str, key: str, turn: Callable[[], None]) -> Sample:
    """Ask QUESTION greedily and wait for the end, with a `turn` each second. Raises SampleFailed, and what
    `turn` raises."""
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    accepted = _call(key, f"{base_url}/v1/requests", body)
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        record = _call(key, f"{base_url}{accepted['links']['self']}?wait={_WAIT_S}")
        if record["status"] == "finished":
            return Sample(record)
        if record["error"]:
            raise SampleFailed(record["error"]["message"])
        if record["status"] == "cancelled" or time.monotonic() > deadline:
            raise SampleFailed(f"{accepted['id']} is {record['status']}")
        turn()


def _call(key: str, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = json.dumps(body).encode() if body is not None else None
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=_WAIT_S + _CALL_S) as response:
            return dict(json.load(response))
    except urllib.error.HTTPError as error:
        raise SampleFailed(error.read().decode(errors="replace")) from error
    except (OSError, HTTPException) as error:
        raise SampleFailed(str(error)) from error
