"""A gateway with API keys: who may call what, and what pages of other origins may do."""

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from werkzeug.test import TestResponse

from app.gateway.gateway import create_app
from app.gateway.keys import stanza
from app.gateway.service import KEY
from relay.rooms import Rooms
from relay.settings import Settings
from tests.gateway_rig import ScriptedWorker
from tests.servers import RedisServer

MODEL = f"keys-{secrets.token_hex(4)}"
KEYS = {name: f"{name}-{secrets.token_hex(8)}" for name in ("alice", "bob", "few", "ops")}
PAGE = "https://page.example"


@pytest.fixture(scope="module")
def app(valkey: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flask]:
    path: Path = tmp_path_factory.mktemp("keys") / "keys.toml"
    entries = [stanza(name, key, admin=name == "ops") for name, key in KEYS.items() if name != "few"]
    path.write_text(
        "\n".join([*entries, stanza("few", KEYS["few"]) + "requests_per_minute = 2\ntokens_per_minute = 9\n"])
    )
    settings = Settings(
        redis_url=valkey.url,
        served_name=MODEL,
        api_keys_file=str(path),
        cors_origins=f"{PAGE} https://b.example",
    )
    app = create_app(settings, ring=lambda ring: None)
    with ScriptedWorker(Rooms(valkey.url, MODEL)):
        yield app
    app.extensions[KEY].close()


def call(app: Flask, method: str, path: str, name: str | None = None, **more: Any) -> TestResponse:
    headers = {"Authorization": f"Bearer {KEYS[name]}"} if name else {}
    return app.test_client().open(path, method=method, headers=headers | more.pop("headers", {}), **more)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/requests", "/v1/requests/req-1", "/nowhere"])
def test_a_call_without_a_known_key_is_refused(app: Flask, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer nobody"}, {"Authorization": f"Basic {KEYS['alice']}"}):
        response = call(app, "GET", path, headers=headers)
        assert response.status_code == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert response.json
        assert response.json["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/metrics/cluster"])
def test_what_watches_the_gateway_needs_no_key(app: Flask, path: str) -> None:
    assert call(app, "GET", path).status_code == 200


def test_a_key_may_come_in_either_header(app: Flask) -> None:
    assert call(app, "GET", "/v1/models", "alice").status_code == 200
    assert call(app, "GET", "/v1/models", headers={"X-Api-Key": KEYS["alice"]}).status_code == 200


def test_pages_of_named_origins_may_call_and_no_others(app: Flask) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = call(app, "OPTIONS", "/v1/requests", headers={"Origin": PAGE} | asked)
    assert allowed.status_code == 200
    assert allowed.headers["Access-Control-Allow-Origin"] == PAGE
    other = call(app, "OPTIONS", "/v1/requests", headers={"Origin": "https://evil.example"} | asked)
    assert "Access-Control-Allow-Origin" not in other.headers


def submitted(app: Flask, name: str, **headers: str) -> str:
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    response = call(app, "POST", "/v1/requests", name, json={"prompt": "a", "max_tokens": 1}, headers=named)
    assert response.status_code == 202
    assert response.json
    return str(response.json["id"])


def test_a_request_is_its_owners_alone(app: Flask) -> None:
    path = f"/v1/requests/{submitted(app, 'alice')}"
    for method, where in (
        ("GET", path),
        ("GET", f"{path}/stream"),
        ("GET", f"{path}/timeline"),
        ("DELETE", path),
    ):
        hidden = call(app, method, where, "bob")
        never = call(app, method, where.replace(path, "/v1/requests/req-never"), "bob")
        assert hidden.status_code == never.status_code == 404
        assert hidden.json
        assert hidden.json["error"]["code"] == "request_not_found"
    assert call(app, "GET", path, "alice").status_code == 200
    assert call(app, "GET", path, "ops").status_code == 200
    assert call(app, "DELETE", path, "alice").json["status"] == "cancelled"  # type: ignore[index]


def test_lists_show_what_is_ones_own(app: Flask) -> None:
    ids = {name: submitted(app, name) for name in ("alice", "bob")}

    def listed(name: str) -> set[str]:
        found = call(app, "GET", "/v1/requests?limit=1000", name).json
        assert found
        return {each["id"] for each in found["data"]}

    assert ids["alice"] in listed("alice")
    assert ids["bob"] not in listed("alice")
    assert set(ids.values()) <= listed("ops")
    assert call(app, "GET", f"/v1/requests?before={ids['bob']}", "alice").status_code == 404


def test_idempotency_keys_are_ones_own(app: Flask) -> None:
    first = submitted(app, "alice", Idempotency_Key="job-1")
    assert submitted(app, "alice", Idempotency_Key="job-1") == first
    assert submitted(app, "bob", Idempotency_Key="job-1") != first


def test_a_limited_key_is_told_when_to_come_again(app: Flask) -> None:
    for _ in range(2):
        submitted(app, "few")
    response = call(app, "POST", "/v1/completions", "few", json={"prompt": "a", "max_tokens": 1})
    assert response.status_code == 429
    assert response.json
    assert response.json["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(response.headers["Retry-After"]) <= 120


def test_a_prompt_beyond_the_limit_of_its_key_is_refused_for_good(app: Flask) -> None:
    response = call(app, "POST", "/v1/completions", "few", json={"prompt": [1] * 10, "max_tokens": 1})
    assert response.status_code == 400
    assert response.json
    assert response.json["error"]["code"] == "exceeds_token_limit"
