"""The server of requests, and the broker."""

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from app.doctor.finding import Finding, fail, ok, warn
from relay.protocol import Protocol, ProtocolMismatch
from relay.redis_client import probe_client
from relay.redis_url import RedisUrl
from relay.rooms import root_key
from relay.settings import Settings, variable

_OLDEST = 7
_SLOW_MS = 5.0
_CLOCK_S = 2.0
_PATIENCE_S = 5.0


def check_server(settings: Settings) -> Iterator[Finding]:
    if not variable("REDIS_URL", os.environ):
        yield ok("redis", "REDIS_URL is not set: `kvrelay up` starts a Valkey of its own")
        return
    url = RedisUrl.parse(settings.redis_url)
    try:
        with probe_client(settings.redis_url, _PATIENCE_S) as client:
            answer_ms, clock_s = _ask_time(client)
            info = client.info()
            protocol = _protocol(client, settings)
    except (RedisError, OSError) as error:
        yield fail("redis", f"{url} does not answer ({error})", "start that server, or correct REDIS_URL")
        return
    yield from judge_server(info, str(url), answer_ms)
    yield judge_clock(clock_s)
    yield protocol


def judge_server(info: Mapping[str, Any], url: str, answer_ms: float) -> Iterator[Finding]:
    """`info`: what INFO tells."""
    name = str(info.get("server_name", "redis")).capitalize()
    version = str(info.get("valkey_version") or info["redis_version"])
    shown = f"{name} {version} at {url} answers in {answer_ms:.1f} ms"
    if int(str(info["redis_version"]).split(".")[0]) < _OLDEST:
        yield fail("redis", f"{shown}: too old, it has no functions", "use Redis 7 or Valkey")
    elif info.get("role") == "slave":
        yield fail("redis", f"{shown}: it is a replica", "let REDIS_URL name the primary")
    elif answer_ms > _SLOW_MS:
        yield warn("redis", f"{shown}: slow", "move it nearer: each token of each step waits for it")
    else:
        yield ok("redis", shown)
    policy = info.get("maxmemory_policy")
    if policy != "noeviction":
        todo = "CONFIG SET maxmemory-policy noeviction, and in its configuration"
        yield fail("eviction", f"maxmemory-policy is {policy}: queues and records could vanish", todo)
    elif not info.get("maxmemory"):
        todo = "set maxmemory, so that a full server refuses new requests and its machine does not kill it"
        yield warn("eviction", "noeviction, but its memory has no limit", todo)
    else:
        yield ok("eviction", f"noeviction within {int(info['maxmemory']) >> 20} MiB")
    if not info.get("aof_enabled"):
        yield warn(
            "durability", "appendonly is no: a crash of Redis loses all requests", "set appendonly yes"
        )
    elif info.get("aof_last_write_status") == "err":
        yield fail("durability", "the append-only file could not be written", "see the server's log and disk")
    else:
        yield ok("durability", "append-only file")


def judge_clock(clock_s: float) -> Finding:
    """`clock_s`: how far the server's clock is ahead."""
    if abs(clock_s) <= _CLOCK_S:
        return ok("clock", f"{abs(clock_s):.2f} s from the server's")
    # Leases go by the server's clock, but logs and the times of a ledger come from both.
    todo = "run an NTP client, as chrony, on both machines"
    return warn("clock", f"{abs(clock_s):.0f} s {'behind' if clock_s > 0 else 'ahead of'} the server's", todo)


def _protocol(client: Redis, settings: Settings) -> Finding:
    protocol = Protocol(client, root_key(settings.model_name))
    try:
        found = protocol.look()
    except ProtocolMismatch as error:
        what, _, todo = str(error).partition(". ")
        return fail("version", what, todo)
    if found == protocol.number:
        return ok("version", f"protocol {found}, as all that serve {settings.model_name} there")
    return ok("version", f"protocol {protocol.number}: no worker of another one lives there")


def check_broker(settings: Settings) -> Iterator[Finding]:
    if not settings.broker_url:
        return
    url = RedisUrl.parse(settings.broker_url)
    try:
        with probe_client(settings.broker_url, _PATIENCE_S) as client:
            client.ping()
    except (RedisError, OSError) as error:
        yield fail(
            "broker", f"{url} does not answer ({error})", "start it, correct BROKER_URL, or unset that"
        )
    else:
        yield ok("broker", f"{url} answers")


def _ask_time(client: Redis) -> tuple[float, float]:
    """How long an answer takes, in ms, and how far the server's clock is ahead, in s."""
    client.ping()
    start, before = time.perf_counter(), time.time()
    seconds, micros = client.time()  # type: ignore[misc]
    took_s = time.perf_counter() - start
    return 1e3 * took_s, seconds + micros / 1e6 - before - took_s / 2
