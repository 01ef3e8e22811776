"""/v1/pools and the list of requests, as pages watch them: whole, seldom asked of Redis, not sent twice."""

import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from app.gateway.gateway import create_app
from app.gateway.keys import stanza
from app.gateway.service import KEY
from relay.rooms import Rooms
from relay.settings import Settings
from tests.gateway_rig import LOAD, ScriptedWorker, cancel_all, eventually
from tests.servers import RedisServer

MODEL = f"pools-{secrets.token_hex(4)}"
KEYS = {name: f"{name}-{secrets.token_hex(8)}" for name in ("alice", "bob", "ops")}
WATCH = {"Cache-Control": "max-age=1"}


@pytest.fixture(scope="module")
def app(valkey: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flask]:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text("\n".join(stanza(name, key, admin=name == "ops") for name, key in KEYS.items()))
    settings = Settings(redis_url=valkey.url, served_name=MODEL, api_keys_file=str(path))
    app = create_app(settings, ring=lambda ring: None)
    yield app
    app.extensions[KEY].close()


@pytest.fixture
def client(app: Flask) -> FlaskClient:
    return app.test_client()


@pytest.fixture
def rooms(valkey: RedisServer) -> Iterator[Rooms]:
    rooms = Rooms(valkey.url, MODEL)
    yield rooms
    cancel_all(rooms)
    rooms.close()


def by(name: str, **headers: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}", **headers}


def known(reply: TestResponse) -> dict[str, str]:
    return {"If-None-Match": reply.headers["ETag"]}


def pools(client: FlaskClient) -> Any:
    return client.get("/v1/pools", headers=by("alice")).get_json()


def submit(client: FlaskClient, name: str) -> str:
    reply = client.post("/v1/requests", json={"prompt": "a"}, headers=by(name))
    assert reply.status_code == 202, reply.data
    return str(reply.get_json()["id"])


def test_workers_and_queues_are_shown(client: FlaskClient, rooms: Rooms) -> None:
    with ScriptedWorker(rooms, "prefill") as prefill, ScriptedWorker(rooms, "decode"):
        prefill.show(load=LOAD._replace(running=2, held_pages=6, quarantined_pages=1))
        first = submit(client, "alice")
        submit(client, "bob")
        eventually(lambda: pools(client)["queues"]["prefill"]["legs"] == 2, "both are queued")
        found = pools(client)
        record = rooms.record(first)
        assert record
        assert found["model"] == MODEL
        assert found["queues"]["prefill"]["since"] == pytest.approx(
            record.timings.submitted / 1000, abs=0.001
        )
        assert found["queues"]["decode"] == {"legs": 0, "since": None}
        decode, worker = found["workers"]
        assert decode["role"] == "decode"
        assert worker == {
            "id": prefill.boot,
            "name": "prefill",
            "host": "test",
            "role": "prefill",
            "running": 2,
            "waiting": 0,
            "slots": 8,
            "page_size": 16,
            "pages": {"free": 256, "held": 6, "cached": 0, "quarantined": 1},
        }
    eventually(lambda: pools(client)["workers"] == [], "they are gone")


def test_who_has_it_is_not_sent_it_again(client: FlaskClient, rooms: Rooms) -> None:
    for path in ("/v1/pools", "/v1/requests"):
        first = client.get(path, headers=by("alice"))
        again = client.get(path, headers=by("alice", **known(first)))
        assert (again.status_code, again.data) == (304, b"")
    with ScriptedWorker(rooms):
        submit(client, "alice")
    assert client.get("/v1/requests", headers=by("alice", **known(first))).status_code == 200


def test_watchers_cost_one_question_a_second(
    app: Flask, client: FlaskClient, rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    served: Rooms = app.extensions[KEY].rooms
    workers, list_requests = served.workers, served.list_requests
    monkeypatch.setattr(served, "workers", lambda: asked.append("workers") or workers())
    monkeypatch.setattr(served, "list_requests", lambda *args: asked.append("list") or list_requests(*args))
    for _ in range(20):
        client.get("/v1/pools", headers=by("alice"))
        client.get("/v1/requests?limit=7", headers=by("alice", **WATCH))
    # Twenty pages in a moment, or in two if it was a slow one.
    assert asked.count("workers") <= 2
    assert asked.count("list") <= 2


def test_each_key_watches_its_own_requests(client: FlaskClient, rooms: Rooms) -> None:
    with ScriptedWorker(rooms):
        ids = {name: submit(client, name) for name in ("alice", "bob")}

    def seen(name: str) -> set[str]:
        reply = client.get("/v1/requests?limit=5", headers=by(name, **WATCH)).get_json()
        return {request["id"] for request in reply["data"]}.intersection(ids.values())

    eventually(lambda: seen("alice") == {ids["alice"]}, "alice sees hers")
    eventually(lambda: seen("bob") == {ids["bob"]}, "bob sees his")
    eventually(lambda: seen("ops") == set(ids.values()), "an admin sees all")
    # Who does not say that a second matters not is answered as of now.
    cancelled = client.delete(f"/v1/requests/{ids['alice']}", headers=by("alice"))
    assert cancelled.status_code == 200
    now = client.get("/v1/requests?limit=5", headers=by("alice")).get_json()["data"][0]
    assert now["status"] == "cancelled"


def test_the_page_needs_no_key_and_runs_only_its_own_scripts(client: FlaskClient) -> None:
    for path in ("/console", "/console/", "/console/requests/req-1", "/console/static/console.css"):
        reply = client.get(path)
        assert reply.status_code == 200, path
        policy = reply.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
    for path in ("/console/static/nothing.js", "/console/static/../../api/console.py", "/console/other"):
        assert client.get(path).status_code == 404
    assert client.get("/v1/pools").status_code == 401
