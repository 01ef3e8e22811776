"""Processes of two versions at one Redis: who may start, who is refused, and what goes on."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.launch.programs import worker_command, worker_env
from relay import protocol
from relay.protocol import PROTOCOL, Protocol, ProtocolMismatch
from relay.request import Leg, State
from relay.rooms import Rooms, root_key
from tests.gateway_rig import GatewayProcess
from tests.integration.scene import card, claim, submission
from tests.relay_rig import ROOT, Relay, tiny_model
from tests.servers import RedisServer

# Runs a module as a version would that says something else to the others.
AS_THE_NEXT = (
    "import runpy, sys, relay.protocol; relay.protocol.PROTOCOL += 1; sys.argv = sys.argv[1:];"
    " runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
Version = Callable[..., Rooms]


@pytest.fixture
def version(server: RedisServer, model: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Version]:
    """Makes the client of a process, `later` versions after this one."""
    opened = []

    def make(later: int = 0, reads_since: int = 1, of: str = model) -> Rooms:
        with monkeypatch.context() as patch:
            patch.setattr(protocol, "PROTOCOL", PROTOCOL + later)
            opened.append(Rooms(server.url, of))
        monkeypatch.setattr(protocol, "READS_SINCE", reads_since)
        return opened[-1]

    yield make
    for rooms in opened:
        rooms.close()


def held(rooms: Rooms) -> Any:
    return rooms.redis.get(f"{rooms.root}:protocol")


def test_the_first_process_writes_its_number(version: Version) -> None:
    now = version()
    assert now.record("req_a") is None
    assert held(now) == str(PROTOCOL).encode()


@pytest.mark.parametrize("later", [-1, 1])
def test_nobody_joins_living_workers_of_another_version(version: Version, later: int) -> None:
    now, other = version(), version(later)
    now.register(card("P"))
    with pytest.raises(ProtocolMismatch, match=f"1 living workers .* speak protocol {PROTOCOL}"):
        other.register(card("P2"))
    assert held(now) == str(PROTOCOL).encode()
    assert [worker.boot for worker in now.workers()] == ["P"]


def test_workers_from_before_there_were_numbers_count(version: Version) -> None:
    now = version()
    now.register(card("P"))
    now.redis.delete(f"{now.root}:protocol")
    with pytest.raises(ProtocolMismatch, match="speak protocol 1"):
        version().workers()


def test_the_next_version_goes_on_when_the_workers_have_left(version: Version) -> None:
    now, then = version(), version(1)
    now.register(card("P"))
    now.submit(submission("req_a"))
    now.deregister("P")
    got = claim(then, Leg.PREFILL, "P2", wanted="req_a")
    assert got
    then.register(card("P2"))
    for call in (lambda: now.submit(submission("req_b")), lambda: now.record("req_a"), lambda: now.workers()):
        with pytest.raises(ProtocolMismatch):
            call()
    then.deregister("P2")  # what the earlier process must not take for its turn
    with pytest.raises(ProtocolMismatch, match="has taken over"):
        now.submit(submission("req_b"))
    record = then.record("req_a")
    assert record
    assert record.state is State.QUEUED


def test_what_cannot_be_read_is_not_gone_on_with(version: Version) -> None:
    now = version()
    now.submit(submission("req_a"))
    with pytest.raises(ProtocolMismatch, match="1 open requests and batches"):
        version(-1).workers()
    with pytest.raises(ProtocolMismatch, match="1 open requests and batches"):
        version(2, reads_since=PROTOCOL + 1).workers()
    now.cancel("req_a")
    assert version(2).workers() == []
    assert held(now) == str(PROTOCOL + 2).encode()


def test_models_of_two_versions_share_a_server(version: Version) -> None:
    now, other = version(), version(1, of="another")
    for _ in range(2):
        for rooms in (now, other):
            rooms.register(card("P"))
            assert [worker.boot for worker in rooms.workers()] == ["P"]
    other.deregister("P")


def test_to_look_changes_nothing(version: Version) -> None:
    now = version()
    assert Protocol(now.redis, now.root).look() == 1
    assert held(now) is None
    now.register(card("P"))
    assert Protocol(now.redis, now.root).look() == PROTOCOL


def test_a_gateway_that_was_overtaken_says_so(valkey: RedisServer, model: str, tmp_path: Path) -> None:
    with GatewayProcess(valkey.url, model, tmp_path / "log") as gateway, valkey.client() as redis:
        assert gateway.call("GET", "/v1/requests").status == 200
        redis.set(f"{root_key(model)}:protocol", PROTOCOL + 1)
        for method, path, body in (
            ("GET", "/v1/requests", None),
            ("POST", "/v1/requests", {"prompt": "Once"}),
            ("GET", "/v1/batches", None),
        ):
            reply = gateway.call(method, path, body)
            assert (reply.status, reply.body["error"]["code"]) == (503, "other_version"), reply.raw
        ready = gateway.call("GET", "/ready")
        assert (ready.status, ready.body["missing"]) == (503, [f"gateway of protocol {PROTOCOL + 1}"])


def test_a_process_of_another_version_is_refused_and_the_others_go_on(
    valkey: RedisServer, tmp_path: Path
) -> None:
    relay = Relay(valkey, tmp_path, "versions", MODEL=str(tiny_model(tmp_path / "model")))
    try:
        (worker,) = relay.start("unified")
        relay.ready()
        env = {**os.environ, **relay.env, **worker_env("unified")}
        later = [sys.executable, "-c", AS_THE_NEXT]
        for command in (
            [*later, *worker_command("unified", relay.model, "later")[2:]],
            [*later, "app.cli", "gateway"],
            [*later, "app.cli", "batches"],
            [*later, "app.cli", "doctor"],
        ):
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
            assert done.returncode == (1 if command[-1] == "doctor" else os.EX_CONFIG), done
            told = done.stdout + done.stderr
            assert f"1 living workers under kvr:{{versions}} speak protocol {PROTOCOL}" in told
            assert "Stop them first" in told
            assert "Traceback" not in told
        assert len(relay.ask(range(3, 20)).tokens) == 16
        assert relay.stop(worker) == 0
    finally:
        relay.close()
