"""What the proxies of vLLM and SGLang add in the place of a gateway, before engines that are played.

`PEER_VLLM=/path/to/environment PEER_SGLANG=/path/to/another python -m bench.proxied`: the first needs aiohttp
and no more, the second `sglang-router`. The engines answer at once.
"""

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import httpx

from app.measure.table import middle, percentile, show
from bench.kept import Kept
from bench.system import free_port

REQUESTS, TOKENS, STEP_S = 16, 64, 0.005
START_S = 60.0
ROUNDS = 3  # direct and proxied in turn, since the machine is not the same from minute to minute
BODY = {"model": "played", "prompt": "a", "stream": True}
_VLLM = Path(__file__).with_name("peers") / "vllm_proxy.py"


class Proxy(NamedTuple):
    """`command` serves on `port` before the engine."""

    name: str
    command: list[str]
    port: int


def run() -> None:
    prefill, decode = _play_engine(1), _play_engine(TOKENS)
    rows = []
    for proxy in _proxies(f"http://127.0.0.1:{prefill}", f"http://127.0.0.1:{decode}"):
        rows += _rows(proxy, f"http://127.0.0.1:{decode}")
    if not rows:
        print("\nNo proxy was measured: neither PEER_VLLM nor PEER_SGLANG names an environment")
        return
    show(
        "Added by a proxy, ms: to the first token of engines that answer at once; to a token",
        ("proxy", "at once", "request, median", "p99", "token, median", "p99"),
        rows,
    )


def _proxies(prefill: str, decode: str) -> Iterator[Proxy]:
    """Those whose environments there are."""
    if peer := os.environ.get("PEER_VLLM"):
        port = free_port()
        yield Proxy("vLLM's proxy", [f"{peer}/bin/python", str(_VLLM), str(port), prefill, decode], port)
    if peer := os.environ.get("PEER_SGLANG"):
        for name, more in (
            ("SGLang's router", ["--prometheus-port", str(free_port())]),
            ("SGLang's mini_lb", ["--mini-lb"]),
        ):
            port = free_port()
            command = [f"{peer}/bin/python", "-m", "sglang_router.launch_router", "--pd-disaggregation"]
            command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
            command += ["--prefill", prefill, str(free_port()), "--decode", decode]
            yield Proxy(name, [*command, *more], port)


def _rows(proxy: Proxy, engine: str) -> list[tuple[object, ...]]:
    url = f"http://127.0.0.1:{proxy.port}"
    with TemporaryDirectory() as folder:
        kept = Kept(proxy.command, os.environ, Path(folder) / "proxy.log")
        try:
            kept.wait_until(lambda: _answers(url), START_S)
            return [(proxy.name, *_row(engine, url, at_once)) for at_once in (1, 8)]
        finally:
            kept.stop()


def _row(engine: str, proxy: str, at_once: int) -> tuple[object, ...]:
    direct: tuple[list[float], list[float]] = ([], [])
    proxied: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for url, found in ((engine, direct), (proxy, proxied)):
            for all_ms, more_ms in zip(found, _measure(url, at_once), strict=True):
                all_ms.extend(more_ms)
    return at_once, *(
        statistic(behind) - statistic(before)
        for before, behind in zip(direct, proxied, strict=True)
        for statistic in (middle, lambda values: percentile(values, 0.99))
    )


def _measure(url: str, at_once: int) -> tuple[list[float], list[float]]:
    """Milliseconds: of each request to its first token, and of each token since the engine wrote it."""
    first_ms: list[float] = []
    token_ms: list[float] = []

    def one(_: int) -> None:
        with httpx.Client(base_url=url, timeout=60) as http:
            http.get("/health")
            sent = time.perf_counter()
            with http.stream("POST", "/v1/completions", json=BODY) as response:
                came = [
                    (float(line.removeprefix("data: ")), time.perf_counter())
                    for line in response.iter_lines()
                    if line
                ]
            first_ms.append(1000 * (came[0][1] - sent))
            token_ms.extend(1000 * (seen - written) for written, seen in came[1:])

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, range(REQUESTS)))
    return first_ms, token_ms


def _play_engine(tokens: int) -> int:
    """Says so many, on a thread, until this process ends. Its port."""
    port = free_port()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(asyncio.start_server(partial(_answer, tokens), "127.0.0.1", port))
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return port


async def _answer(tokens: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length:")[2].split("\r\n")[0] or 0)
    body = json.loads(await reader.readexactly(length) or b"{}")
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: application/json\r\n\r\n")
    if body.get("stream"):
        for number in range(tokens):
            await asyncio.sleep(STEP_S if number else 0.0)
            writer.write(f"data: {time.perf_counter()}\n\n".encode())
            await writer.drain()
    else:
        writer.write(b'{"kv_transfer_params": {}}')
        await writer.drain()
    writer.close()


def _answers(url: str) -> bool:
    """A router is there before it knows its engines."""
    try:
        return httpx.post(f"{url}/v1/completions", json=BODY, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


if __name__ == "__main__":
    run()
