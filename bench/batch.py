"""A large batch to its end, its processor killed in the middle: is each line answered exactly once?"""

import json
import os
import signal
import time
from collections import Counter
from typing import Any

import httpx

from app.measure.table import show
from bench import client
from bench.system import System

LINES = int(os.environ.get("BATCH_LINES", "50000"))
OPEN_LINES = 64
POLL_S = 2.0
ENDPOINT = "/v1/completions"


def run() -> None:
    with System(BATCH_OPEN_LINES=str(OPEN_LINES)) as system, client.connect(system.url) as http:
        body = {"max_tokens": 1, "temperature": 0, "ignore_eos": True}
        lines = [
            {
                "custom_id": str(i),
                "method": "POST",
                "url": ENDPOINT,
                "body": body | {"prompt": [1000 + i % 30_000]},
            }
            for i in range(LINES)
        ]
        content = "\n".join(map(json.dumps, lines)).encode()
        upload = _json(http.post("/v1/files", files={"file": content}, data={"purpose": "batch"}))
        asked = {"input_file_id": upload["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
        began = time.monotonic()
        batch = _json(http.post("/v1/batches", json=asked))
        killed_at = None
        while batch["status"] in ("validating", "in_progress", "finalizing"):
            time.sleep(POLL_S)
            batch = _json(http.get(f"/v1/batches/{batch['id']}"))
            completed = batch["request_counts"]["completed"]
            print(f"{time.monotonic() - began:.0f} s: {batch['status']}, {completed} lines", flush=True)
            if killed_at is None and completed >= LINES // 3:
                killed_at = completed
                system.processes()["batches"].send_signal(signal.SIGKILL)
        seconds = time.monotonic() - began
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
        ],
    )


def _results(http: httpx.Client, batch: dict[str, Any]) -> list[dict[str, Any]]:
    files = [batch[kind] for kind in ("output_file_id", "error_file_id") if batch.get(kind)]
    texts = [http.get(f"/v1/files/{each}/content").raise_for_status().text for each in files]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def _json(reply: httpx.Response) -> dict[str, Any]:
    return dict(reply.raise_for_status().json())


if __name__ == "__main__":
    run()
