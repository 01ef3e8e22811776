"""Doorbells against a real Valkey that hangs, dies and comes back."""

import base64
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relay import celery
from relay.request import Leg, Ring
from tests.servers import RedisServer, valkey_binary

BELL = Ring(Leg.PREFILL, "req_1", prompt_tokens=812)


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    with RedisServer(valkey_binary(), tmp_path / "valkey", append_fsync="always") as server:
        monkeypatch.setattr(celery, "_model_name", lambda: "m")
        monkeypatch.setattr(celery.app.conf, "broker_url", server.url)
        monkeypatch.setattr(celery.app.amqp, "_producer_pool", None)
        yield server


def bells(broker: RedisServer) -> list[dict[str, Any]]:
    return [json.loads(bell) for bell in broker.client().lrange("prefill.m", 0, -1)]


def test_a_bell_carries_the_id_and_nothing_else(broker: RedisServer) -> None:
    assert celery.ring(BELL)
    assert celery.ring(BELL)
    first, second = bells(broker)
    assert json.loads(base64.b64decode(first["body"]))[:2] == [["req_1"], {}]
    assert first["headers"]["task"] == "kvrelay.prefill"
    assert first["headers"]["argsrepr"] == "('req_1', 812 tok)"
    ids = {bell["headers"]["id"] for bell in (first, second)}
    assert len(ids) == 2
    assert all(each.startswith("req_1:prefill:") for each in ids)


def test_ring_gives_up_when_the_broker_is_away_and_works_again_after(broker: RedisServer) -> None:
    assert celery.ring(BELL)
    broker.kill()
    assert not celery.ring(BELL)
    broker.start()
    assert celery.ring(BELL)
    assert len(bells(broker)) == 2


def test_a_restart_between_two_bells_loses_none(broker: RedisServer) -> None:
    assert celery.ring(BELL)
    broker.kill()
    broker.start()
    assert celery.ring(BELL)


def test_ring_never_hangs_with_a_hanging_broker(broker: RedisServer) -> None:
    assert celery.ring(BELL)
    os.kill(broker.process_id, signal.SIGSTOP)
    try:
        asked = time.monotonic()
        assert not celery.ring(BELL)
        assert time.monotonic() - asked < 10.0
    finally:
        os.kill(broker.process_id, signal.SIGCONT)
