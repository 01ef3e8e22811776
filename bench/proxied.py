"""What vLLM's proxy adds in the place of a gateway, before engines that are played: they answer at once.

`PEER_VLLM=/path/to/environment python -m bench.proxied`; aiohttp is all that the environment needs.
"""

import asyncio
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from app.measure.table import middle, percentile, show
from bench.kept import Kept
from bench.system import free_port

REQUESTS, TOKENS, STEP_S = 16, 64, 0.005
_PROXY = Path(__file__).with_name("peers") / "vllm_proxy.py"


def run() -> None:
    if not (peer := os.environ.get("PEER_VLLM")):
        print("\nvLLM's proxy was not measured: PEER_VLLM names no environment")
        return
    engine = f"http://127.0.0.1:{_play_engine()}"
    proxy_port = free_port()
    proxy = f"http://127.0.0.1:{proxy_port}"
    with TemporaryDirectory() as folder:
        command = [f"{peer}/bin/python", str(_PROXY), str(proxy_port), engine, engine]
        kept = Kept(command, os.environ, Path(folder) / "proxy.log")
        try:
            kept.wait_until(lambda: _answers(proxy), 60)
            rows = [_row(engine, proxy, at_once) for at_once in (1, 8)]
        finally:
            kept.stop()
    show(
        "Added by vLLM's proxy, ms: to the first token of engines that answer at once; to a token",
        ("at once", "request, median", "p99", "token, median", "p99"),
        rows,
    )


def _row(engine: str, proxy: str, at_once: int) -> tuple[object, ...]:
    direct, proxied = _measure(engine, at_once), _measure(proxy, at_once)
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
            with http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
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


def _play_engine() -> int:
    """Serves on a thread until this process ends. Its port."""
    port = free_port()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(asyncio.start_server(_answer, "127.0.0.1", port))
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return port


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length:")[2].split("\r\n")[0] or 0)
    body = json.loads(await reader.readexactly(length) or b"{}")
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: application/json\r\n\r\n")
    if body.get("stream"):
        for _ in range(TOKENS):
            writer.write(f"data: {time.perf_counter()}\n\n".encode())
            await writer.drain()
            await asyncio.sleep(STEP_S)
    else:
        writer.write(b'{"kv_transfer_params": {}}')
        await writer.drain()
    writer.close()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=1).status_code == 200
    except httpx.HTTPError:
        return False


if __name__ == "__main__":
    run()
