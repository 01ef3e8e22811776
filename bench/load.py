"""Many streams and a long queue at one gateway: is anything lost or doubled, does it still answer at once?

1,000 streams stay open while 10,000 submitted requests wait or run; meanwhile others poll and ask /ready.
"""

import asyncio
import json
import os
import random
import time
from collections import Counter
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from app.measure.table import show
from bench import client
from bench.system import System

STREAMS = int(os.environ.get("LOAD_STREAMS", "1000"))
QUEUED = int(os.environ.get("LOAD_QUEUED", "10000"))
PROMPT_TOKENS, TOKENS, STREAM_TOKENS = 8, 2, 4
AT_ONCE = 16  # submitters, and later readers, of what is queued
ASK_EVERY_S = 0.05
IDLE_POLLS = 1_000
POLL_GOAL_MS, READY_GOAL_MS = 50, 200


class Reply(NamedTuple):
    status: int
    body: bytes


def run() -> None:
    with System(MAX_OPEN_REQUESTS=str(STREAMS + QUEUED + 1)) as system:
        gateway = system.processes()["gunicorn child"]
        load = Load(system.url)
        memory = [gateway.memory_info().rss / 1e6]
        began = time.monotonic()
        asyncio.run(load.run(lambda: memory.append(gateway.memory_info().rss / 1e6)))
        seconds = time.monotonic() - began
    polls, readies, idle = sorted(load.poll_s), sorted(load.ready_s), sorted(load.idle_poll_s)
    show(
        f"{STREAMS} streams beside {QUEUED} queued requests, {seconds:.0f} s",
        ("what", "goal", "found"),
        [
            ("streams as asked", STREAMS, load.streams["whole"]),
            ("others", 0, str({k: n for k, n in load.streams.items() if k != "whole"} or "none")),
            ("queued requests as asked", QUEUED, load.queued["whole"]),
            ("others", 0, str({k: n for k, n in load.queued.items() if k != "whole"} or "none")),
            ("poll, ms, median", "", 1000 * polls[len(polls) // 2]),
            ("poll, ms, p99", "", 1000 * polls[len(polls) * 99 // 100]),
            ("poll, ms, p99, workers idle", f"≤ {POLL_GOAL_MS}", 1000 * idle[len(idle) * 99 // 100]),
            ("/ready, ms, slowest", f"≤ {READY_GOAL_MS}", 1000 * readies[-1]),
            ("gateway, MB, at the start", "", memory[0]),
            ("most streams open at a time", STREAMS, load.most_open),
            ("gateway, MB, with all streams open", "", max(memory)),
            ("gateway, MB, at the end", "", memory[-1]),
        ],
    )


class Load:
    """`streams` and `queued` count what became of each; `poll_s` and `ready_s` how long the gateway
    took, `idle_poll_s` when nothing else ran."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        assert address.hostname is not None
        self._address = (address.hostname, address.port)
        self._rng = random.Random(3)
        self._ids: list[str] = []
        self._open = 0
        self.most_open = 0
        self.streams: Counter[str] = Counter()
        self.queued: Counter[str] = Counter()
        self.poll_s: list[float] = []
        self.ready_s: list[float] = []
        self.idle_poll_s: list[float] = []

    async def run(self, look: Any) -> None:
        """`look` is called now and then, to see what the gateway takes."""
        bodies = [self._body(TOKENS) for _ in range(QUEUED)]
        first = asyncio.create_task(self._submit(bodies[: QUEUED // AT_ONCE]))
        others = [
            asyncio.create_task(self._submit(bodies[i * QUEUED // AT_ONCE : (i + 1) * QUEUED // AT_ONCE]))
            for i in range(1, AT_ONCE)
        ]
        streams = [asyncio.create_task(self._stream()) for _ in range(STREAMS)]
        asking = asyncio.create_task(self._ask(look))
        await asyncio.gather(first, *others, *streams)
        await self._drain()
        asking.cancel()
        for request_id in self._rng.choices(self._ids, k=IDLE_POLLS):
            await self._timed(self.idle_poll_s, f"/v1/requests/{request_id}")
        share = [self._ids[i::AT_ONCE] for i in range(AT_ONCE)]
        await asyncio.gather(*(self._read(ids) for ids in share))
        look()

    async def _submit(self, bodies: list[dict[str, Any]]) -> None:
        for body in bodies:
            reply = await self._call("POST", "/v1/requests", body)
            assert reply.status == 202, reply
            self._ids.append(json.loads(reply.body)["id"])

    async def _stream(self) -> None:
        body = self._body(STREAM_TOKENS) | {"stream": True, "stream_options": {"include_usage": True}}
        reader, writer = await self._send("POST", "/v1/completions", body)
        self._open += 1
        self.most_open = max(self.most_open, self._open)
        usage: dict[str, Any] = {}
        last = b""
        async for line in reader:
            if line.startswith((b"data: {", b"HTTP")):
                last = line
            if line.startswith(b"data: {"):
                usage = json.loads(line[6:]).get("usage") or usage
        writer.close()
        self._open -= 1
        whole = (usage.get("prompt_tokens"), usage.get("completion_tokens")) == (PROMPT_TOKENS, STREAM_TOKENS)
        self.streams["whole" if whole else last.decode().strip()] += 1

    async def _ask(self, look: Any) -> None:
        """Poll a request that is known, and ask /ready, as long as it takes."""
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            look()
            if not self._ids:
                continue
            await self._timed(self.poll_s, f"/v1/requests/{self._rng.choice(self._ids)}")
            await self._timed(self.ready_s, "/ready")

    async def _timed(self, seconds: list[float], path: str) -> None:
        began = time.perf_counter()
        reply = await self._call("GET", path)
        seconds.append(time.perf_counter() - began)
        assert reply.status == 200, reply

    async def _drain(self) -> None:
        """Until nothing is open any more."""
        while json.loads((await self._call("GET", "/load")).body)["server_load"]:
            await asyncio.sleep(0.5)

    async def _read(self, ids: list[str]) -> None:
        for request_id in ids:
            record = json.loads((await self._call("GET", f"/v1/requests/{request_id}?wait=60")).body)
            whole = record["status"] == "finished" and record["usage"]["completion_tokens"] == TOKENS
            self.queued["whole" if whole else record["status"]] += 1

    def _body(self, max_tokens: int) -> dict[str, Any]:
        prompt = client.random_prompt(self._rng, PROMPT_TOKENS)
        return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}

    async def _call(self, method: str, path: str, body: Any = None) -> Reply:
        reader, writer = await self._send(method, path, body)
        head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        return Reply(int(head.split(b" ", 2)[1]), rest)

    async def _send(
        self, method: str, path: str, body: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self._address)
        raw = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n"
        )
        writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + raw)
        await writer.drain()
        return reader, writer
