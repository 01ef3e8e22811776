"""A large batch to its end, its processor killed in the middle: is each line answered exactly once?

Beside it a client asks for something each second: lines wait for whoever waits.
"""

import json
import os
import signal
import threading
import time
from collections import Counter
from typing import Any

import httpx

from app.measure.table import middle, percentile, show
from bench import client
from bench.system import System

LINES = int(os.environ.get("BATCH_LINES", "50000"))
OPEN_LINES = 64
POLL_S = 2.0
ENDPOINT = "/v1/completions"
ASK_EVERY_S = 1.0
BODY = {"max_tokens": 1, "temperature": 0, "ignore_eos": True}


def run() -> None:
    with System(BATCH_OPEN_LINES=str(OPEN_LINES)) as system, client.connect(system.url) as http:
        lines = [
            {
                "custom_id": str(i),
                "method": "POST",
                "url": ENDPOINT,
                "body": BODY | {"prompt": [1000 + i % 30_000]},
            }
            for i in range(LINES)
        ]
        content = "\n".join(map(json.dumps, lines)).encode()
        upload = _json(http.post("/v1/files", files={"file": content}, data={"purpose": "batch"}))
        asked = {"input_file_id": upload["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
        began = time.monotonic()
        batch = _json(http.post("/v1/batches", json=asked))
        killed_at = None
        beside = Beside(system.url)
        while batch["status"] in ("validating", "in_progress", "finalizing"):
            time.sleep(POLL_S)
            batch = _json(http.get(f"/v1/batches/{batch['id']}"))
            completed = batch["request_counts"]["completed"]
            print(f"{time.monotonic() - began:.0f} s: {batch['status']}, {completed} lines", flush=True)
            if killed_at is None and completed >= LINES // 3:
                killed_at = completed
                system.processes()["batches"].send_signal(signal.SIGKILL)
        seconds = time.monotonic() - began
        beside.stop()
        found = Counter(line["custom_id"] for line in _results(http, batch))
    show(
        f"A batch of {LINES} lines, its processor killed after {killed_at}: {batch['status']}",
        ("what", "goal", "found"),
        [
            ("lines answered once", LINES, sum(count == 1 for count in found.values())),
            ("lines answered twice or more", 0, sum(count > 1 for count in found.values())),
            ("of them failed", 0, batch["request_counts"]["failed"]),
            ("seconds", "", seconds),
            ("lines per second", "", LINES / seconds),
            ("requests of a client beside it", "", len(beside.took_ms)),
            ("of them failed", 0, beside.failed),
            ("of them, ms, median", "", middle(beside.took_ms)),
            ("of them, ms, p99", "", percentile(beside.took_ms, 0.99)),
        ],
    )


class Beside:
    """A client that asks now and then, on a thread of its own, until it is stopped."""

    def __init__(self, url: str) -> None:
        self.took_ms: list[float] = []
        self.failed = 0
        self._url = url
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        with client.connect(self._url) as http:
            while not self._stopping.wait(ASK_EVERY_S):
                asked = time.perf_counter()
                reply = http.post(ENDPOINT, json=BODY | {"prompt": [7]})
                self.took_ms.append(1000 * (time.perf_counter() - asked))
                self.failed += reply.status_code != 200


def _results(http: httpx.Client, batch: dict[str, Any]) -> list[dict[str, Any]]:
    files = [batch[kind] for kind in ("output_file_id", "error_file_id") if batch.get(kind)]
    texts = [http.get(f"/v1/files/{each}/content").raise_for_status().text for each in files]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def _json(reply: httpx.Response) -> dict[str, Any]:
    return dict(reply.raise_for_status().json())


if __name__ == "__main__":
    run()
