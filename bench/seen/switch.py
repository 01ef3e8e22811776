"""Turns metrics and traces of a running system on and off: counts in each process and in Redis, scrapes,
timelines, exports. What is on is done TIMES over, so that its cost stands out from the noise."""

import itertools
import tempfile
import threading
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from redis import Redis

from bench.system import System, free_port
from relay.protocol import PROTOCOL

TIMES = 10
SCRAPE_EVERY_S = 5.0  # as deploy/prometheus/prometheus.yml does
_COUNTS = "local function count(c, times, ...)\n"
_MORE_COUNTS = f"""  for _ = 2, {TIMES} do
    if times > 0 then redis.call('HINCRBY', key(c, 'counts'), table.concat({{ ... }}, '/'), times) end
  end
"""
_NOTES = "local function note(c, r, name, leg, detail)\n"
_MORE_NOTES = f"""  for _ = 2, {TIMES} do
    local aside = key(c, 'aside', r.id)
    redis.call('LLEN', aside)
    redis.call('RPUSH', aside, cjson.encode({{ name, c.stamp, leg, tonumber(r.tokens), detail or '' }}))
    redis.call('PEXPIRE', aside, 5000)
  end
"""
_NOTHING = "  do return end\n"
_numbers = itertools.count(1)


class Seen(Enum):
    """What is on."""

    NOTHING = "nothing"
    METRICS = "metrics"
    ALL = "metrics, and every request traced"


def library(seen: Seen) -> str:
    """The functions in Redis, which count and note so much."""
    code = files("relay").joinpath("rooms.lua").read_text().replace("$PROTOCOL", str(PROTOCOL))
    assert _COUNTS in code
    assert _NOTES in code
    code = code.replace(_COUNTS, _COUNTS + (_NOTHING if seen is Seen.NOTHING else _MORE_COUNTS))
    return code.replace(_NOTES, _NOTES + (_MORE_NOTES if seen is Seen.ALL else _NOTHING))


class Collector(ThreadingHTTPServer):
    """Takes what comes and looks at none of it: its work is not the system's."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.taken_bytes = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        size_bytes = int(self.headers["Content-Length"])
        self.rfile.read(size_bytes)
        self.server.taken_bytes += size_bytes
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """A line for each would be noise."""


class Switch:
    """As a context manager: `system` runs, and is seen as `to` says."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvrelay-seen-")
        self._byte = Path(self._folder.name) / "seen"
        self._byte.write_bytes(b"\0")
        self.collector = Collector()
        self.system = System(
            METRICS_PORT=str(free_port()),
            BATCH_PROCESSORS="0",
            OTEL_EXPORTER_OTLP_ENDPOINT=self.collector.url,
            BENCH_SEEN=str(self._byte),
            BENCH_TIMES=str(TIMES),
            PYTHONPATH=str(Path(__file__).parent),
        )
        self.scraped_bytes = 0
        self._seen = Seen.NOTHING
        self._closing = threading.Event()
        self._scraper = threading.Thread(target=self._scrape)

    def __enter__(self) -> Self:
        self.system.__enter__()
        self.pages = {name: f"{self.system.url}/{name}" for name in ("metrics", "metrics/cluster")}
        for found in httpx.get(f"{self.system.url}/metrics/targets").json():
            role = found["labels"]["__meta_kvrelay_role"]
            self.pages[role] = f"http://{found['targets'][0]}/metrics"
        assert {"prefill", "decode"} < self.pages.keys()
        self._redis = Redis.from_url(self.system.redis_url)
        self._scraper.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._closing.set()
        if self._scraper.is_alive():
            self._scraper.join()
        self.system.__exit__()
        self.collector.shutdown()
        self._folder.cleanup()

    def to(self, seen: Seen) -> None:
        self._redis.function_load(library(seen), replace=True)
        with self._byte.open("r+b") as file:
            file.write(bytes([0 if seen is Seen.NOTHING else TIMES]))
        self._seen = seen

    def traceparent(self) -> str:
        """For a request that begins now."""
        return f"00-{next(_numbers):032x}-{1:016x}-{int(self._seen is Seen.ALL):02x}"

    def _scrape(self) -> None:
        with httpx.Client() as http:
            while not self._closing.wait(SCRAPE_EVERY_S / TIMES):
                for page in self.pages.values() if self._seen is not Seen.NOTHING else ():
                    self.scraped_bytes += len(http.get(page).raise_for_status().content)
