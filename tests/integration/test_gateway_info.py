"""What a gateway tells of its model and itself, beside requests."""

import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from flask import Flask

from app.gateway.gateway import create_app
from app.gateway.service import KEY
from relay.rooms import Rooms
from relay.settings import Settings
from tests.gateway_rig import ScriptedWorker, default_tokenizer
from tests.servers import RedisServer

MODEL = f"info-{secrets.token_hex(4)}"
USER, ADMIN = secrets.token_hex(16), secrets.token_hex(16)


@pytest.fixture(scope="module")
def app(valkey: RedisServer) -> Iterator[Flask]:
    settings = Settings(redis_url=valkey.url, served_name=MODEL, api_key=USER, admin_key=ADMIN)
    app = create_app(settings, ring=lambda ring: None)
    with ScriptedWorker(Rooms(valkey.url, MODEL)):
        yield app
    app.extensions[KEY].close()


def call(app: Flask, method: str, path: str, body: Any = None, key: str = USER) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    response = app.test_client().open(path, method=method, json=body, headers=headers)
    return response.status_code, response.get_json(silent=True)


def test_a_text_there_and_back(app: Flask) -> None:
    text, tokenizer = "Grüße, world!\n", default_tokenizer()
    status, reply = call(app, "POST", "/tokenize", {"prompt": text, "return_token_strs": True})
    assert status == 200
    assert reply["tokens"] == tokenizer.encode(text)
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
    assert reply["max_model_len"] == 8192
    assert call(app, "POST", "/detokenize", {"tokens": reply["tokens"]}) == (200, {"prompt": text})


def test_messages_are_counted_as_a_chat_would_send_them(app: Flask) -> None:
    messages = [{"role": "user", "content": "hi"}]
    status, reply = call(app, "POST", "/tokenize", {"messages": messages, "model": MODEL})
    assert status == 200
    text = call(app, "POST", "/detokenize", {"tokens": reply["tokens"]})[1]["prompt"]
    assert "<|im_start|>user\nhi<|im_end|>" in text


def test_a_chat_is_counted_with_all_that_makes_its_prompt(app: Flask) -> None:
    def shown(**more: Any) -> str:
        reply = call(app, "POST", "/tokenize", {"messages": [{"role": "user", "content": "hi"}], **more})[1]
        return str(call(app, "POST", "/detokenize", {"tokens": reply["tokens"]})[1]["prompt"])

    begun = "<|im_start|>assistant\n"
    assert shown().endswith(begun)
    assert shown(temperature=0, max_tokens=5) == shown()
    assert not shown(add_generation_prompt=False).endswith(begun)
    tool = {"type": "function", "function": {"name": "look_up"}}
    assert "look_up" in shown(tools=[tool])
    assert "look_up" not in shown(tools=[tool], tool_choice="none")
    reply = call(app, "POST", "/tokenize", {"prompt": "one two three", "truncate_prompt_tokens": 1})[1]
    assert reply["tokens"] == default_tokenizer().encode("one two three")[-1:]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, None),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, 400, None),
        ("/tokenize", {"prompt": 3}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [49152]}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
def test_what_is_wrong_is_named(app: Flask, path: str, body: Any, status: int, param: str | None) -> None:
    found, reply = call(app, "POST", path, body)
    assert (found, reply["error"]["param"]) == (status, param)


def test_what_it_is(app: Flask) -> None:
    assert app.test_client().get("/ping").status_code == 200
    assert set(call(app, "GET", "/version")[1]) == {"version"}
    server = call(app, "GET", "/server_info")[1]
    assert server["served_model_name"] == MODEL
    assert server["workers"] == [{"name": "unified@test", "role": "unified", "kv_tokens": 4096}]
    assert not {USER, ADMIN}.intersection(str(server).split("'"))
    assert call(app, "GET", "/model_info")[1]["is_generation"] is True


def test_load_counts_what_waits_and_runs(app: Flask) -> None:
    before = call(app, "GET", "/load")[1]["server_load"]
    _, request = call(app, "POST", "/v1/requests", {"prompt": "a", "max_tokens": 1})
    assert call(app, "GET", "/load")[1]["server_load"] == before + 1
    call(app, "DELETE", request["links"]["self"])
    assert call(app, "GET", "/load")[1]["server_load"] == before


def test_only_an_admin_flushes(app: Flask) -> None:
    for path in ("/flush_cache", "/reset_prefix_cache"):
        status, reply = call(app, "POST", path)
        assert (status, reply["error"]["code"]) == (403, "admin_only")


def test_the_document_and_its_page_need_no_key(app: Flask) -> None:
    client = app.test_client()
    assert client.get("/openapi.json").get_json()["openapi"] == "3.1.0"
    page = client.get("/docs", follow_redirects=True)
    assert page.status_code == 200
    assert b"swagger-ui" in page.data
    assert b"openapi.json" in client.get("/docs/swagger-initializer.js").data
    assert client.get("/docs/swagger-ui-bundle.js").status_code == 200
    assert client.get("/docs/nothing.js").status_code == 404
