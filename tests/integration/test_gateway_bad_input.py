"""What clients must not send: each case is refused in the one error form, and leaves no record behind."""

import json
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from flask import Flask
from werkzeug.test import TestResponse

from app.gateway.gateway import create_app
from app.gateway.service import KEY
from relay.rooms import Rooms
from relay.settings import Settings
from tests.gateway_rig import ScriptedWorker
from tests.servers import RedisServer

MODEL = f"bad-{secrets.token_hex(4)}"
NATIVE, TEXT, CHAT = "/v1/requests", "/v1/completions", "/v1/chat/completions"
ASK = [{"role": "user", "content": "hi"}]
VOCABULARY = 49152


@pytest.fixture(scope="module")
def app(valkey: RedisServer) -> Iterator[Flask]:
    app = create_app(
        Settings(redis_url=valkey.url, served_name=MODEL, max_body_bytes=65_536), ring=lambda ring: None
    )
    with ScriptedWorker(Rooms(valkey.url, MODEL)):
        yield app
    app.extensions[KEY].close()


def refused(app: Flask, response: TestResponse, status: int, code: str, param: str | None = None) -> None:
    assert response.status_code == status, response.get_data(as_text=True)
    assert response.content_type == "application/json"
    error = json.loads(response.get_data())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param)
    assert error["message"][-1] in ".)?"
    assert app.extensions[KEY].rooms.list_requests(10) == []


# path, fields beyond a valid prompt, parameter that the error names, code
FIELDS: list[tuple[str, dict[str, Any], str, str]] = [
    *(
        (NATIVE, {"temperature": value}, "temperature", "invalid_value")
        for value in (-0.1, 2.1, "1", True, [1])
    ),
    *((NATIVE, {"top_p": value}, "top_p", "invalid_value") for value in (0, 1.1, -1, "x")),
    *((NATIVE, {"top_k": value}, "top_k", "invalid_value") for value in (-2, 1.5, True, 10**30)),
    *((NATIVE, {"min_p": value}, "min_p", "invalid_value") for value in (-0.1, 1.1)),
    *((NATIVE, {"presence_penalty": value}, "presence_penalty", "invalid_value") for value in (-2.1, 2.1)),
    *((NATIVE, {"frequency_penalty": value}, "frequency_penalty", "invalid_value") for value in (-3, "0")),
    *((NATIVE, {"repetition_penalty": value}, "repetition_penalty", "invalid_value") for value in (0, -1)),
    *(
        (NATIVE, {"max_tokens": value}, "max_tokens", "invalid_value")
        for value in (0, -1, 1.5, "9", True, 10**40)
    ),
    (NATIVE, {"max_tokens": 9_000}, "max_tokens", "context_length_exceeded"),
    (NATIVE, {"max_tokens": 5_000}, "max_tokens", "exceeds_kv_capacity"),
    (NATIVE, {"min_tokens": 5, "max_tokens": 4}, "min_tokens", "invalid_value"),
    (NATIVE, {"min_tokens": -1}, "min_tokens", "invalid_value"),
    *((NATIVE, {"seed": value}, "seed", "invalid_value") for value in (1 << 63, -(1 << 64), 0.5, "1")),
    *((NATIVE, {"stop": value}, "stop", "invalid_value") for value in ("", ["a", ""], ["a"] * 5, 3, [3], {})),
    *(
        (NATIVE, {"stop_token_ids": value}, "stop_token_ids", "invalid_value")
        for value in ([-1], [VOCABULARY], 3)
    ),
    (NATIVE, {"stop_token_ids": [True]}, "stop_token_ids.0", "invalid_value"),
    *(
        (NATIVE, {"logit_bias": value}, "logit_bias", "invalid_value")
        for value in (
            {"x": 1},
            {"-1": 1},
            {"1.5": 1},
            {str(VOCABULARY): 1},
            {"9" * 30: 1},
            [1],
            "x",
            {"²": 1},
        )
    ),
    *((NATIVE, {"logit_bias": {"7": value}}, "logit_bias.7", "invalid_value") for value in (101, "1", True)),
    *((NATIVE, {"logprobs": value}, "logprobs", "invalid_value") for value in (-1, 21, True, 0.5)),
    *((NATIVE, {"ignore_eos": value}, "ignore_eos", "invalid_value") for value in (1, "true")),
    *((NATIVE, {"timeout": value}, "timeout", "invalid_value") for value in (0, -1, 10**9, "60")),
    (NATIVE, {"model": 3}, "model", "invalid_value"),
    (NATIVE, {"guided_choice": ["yes"], "allowed_token_ids": [5]}, "allowed_token_ids", "invalid_value"),
    *((path, {"model": "other"}, "model", "model_not_found") for path in (NATIVE, TEXT, CHAT)),
    *(
        (path, {"n": value}, "n", "invalid_value")
        for path in (NATIVE, TEXT, CHAT)
        for value in (0, -1, 129, "1", 1.5)
    ),
    *((path, {"best_of": 2}, "best_of", "unsupported_parameter") for path in (NATIVE, CHAT)),
    *(
        (TEXT, {"best_of": 2} | fields, "best_of", "invalid_value")
        for fields in ({"n": 3}, {"stream": True}, {"best_of": 0}, {"best_of": 129})
    ),
    (TEXT, {"prompt": ["a"] * 9, "n": 128}, "n", "invalid_value"),
    (TEXT, {"prompt": ["a"] * 1025}, "prompt", "invalid_value"),
    *(
        (TEXT, {"prompt": value}, "prompt", "invalid_value")
        for value in (
            ["a", ""],
            ["a", 1],
            ["a", [1]],
            [[1], []],
            [[1], "a"],
            [[1], [1.5]],
            [[1], [VOCABULARY]],
        )
    ),
    *((NATIVE, {"prompt": value}, "prompt", "invalid_value") for value in (["a", "b"], [[1], [2]])),
    *(
        (TEXT, {name: value}, name, "unsupported_parameter")
        for name, value in [
            ("suffix", "x"),
            ("guided_whitespace_pattern", " "),
            ("stop_regex", "x"),
            ("kv_transfer_params", {"x": 1}),
        ]
    ),
    *(
        (CHAT, {name: value}, name, "unsupported_parameter")
        for name, value in [
            ("function_call", {"name": "f"}),
            ("functions", [{}]),
        ]
    ),
    *(
        (TEXT, {name: value}, param, "invalid_value")
        for name, value, param in [
            ("allowed_token_ids", [], "allowed_token_ids"),
            ("allowed_token_ids", [VOCABULARY], "allowed_token_ids"),
            ("bad_words", [""], "bad_words.0"),
            ("bad_words", "x", "bad_words"),
            ("truncate_prompt_tokens", 0, "truncate_prompt_tokens"),
            ("truncate_prompt_tokens", -2, "truncate_prompt_tokens"),
            ("cache_salt", "", "cache_salt"),
            ("priority", 1.5, "priority"),
            ("add_special_tokens", 1, "add_special_tokens"),
            ("timeout", 0, "timeout"),
            ("echo", 1, "echo"),
            ("request_id", "two words", "request_id"),
            ("max_tokens", 0, "max_tokens"),
            ("prompt_logprobs", 21, "prompt_logprobs"),
            ("prompt_logprobs", -1, "prompt_logprobs"),
            ("return_token_ids", 1, "return_token_ids"),
            ("regex", "(", "regex"),
            ("response_format", {"type": "xml"}, "response_format.type"),
        ]
    ),
    *(
        (CHAT, {name: value}, name, "invalid_value")
        for name, value in [
            ("continue_final_message", True),
            ("chat_template", "{{ messages }}"),
            ("chat_template_kwargs", {"messages": []}),
            ("chat_template_kwargs", 1),
            ("reasoning_effort", 3),
            ("tools", 3),
            ("tool_choice", "required"),
            ("parallel_tool_calls", "no"),
        ]
    ),
    (NATIVE, {"return_token_ids": True}, "return_token_ids", "unsupported_parameter"),
    (NATIVE, {"stream": True}, "stream", "unsupported_parameter"),
    (TEXT, {"messages": ASK}, "messages", "unsupported_parameter"),
    (CHAT, {"verbosity": "high"}, "verbosity", "unsupported_parameter"),
    (
        TEXT,
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "unsupported_parameter",
    ),
    (TEXT, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "invalid_value"),
    (TEXT, {"stream": "yes"}, "stream", "invalid_value"),
    (TEXT, {"stream": True, "stream_options": 1}, "stream_options", "invalid_value"),
    (
        TEXT,
        {"stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
        "invalid_value",
    ),
    (CHAT, {"logprobs": 1}, "logprobs", "invalid_value"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
    (CHAT, {"max_completion_tokens": 8_192}, "max_tokens", "context_length_exceeded"),
]


@pytest.mark.parametrize(("path", "fields", "param", "code"), FIELDS)
def test_a_wrong_field_is_named(app: Flask, path: str, fields: dict[str, Any], param: str, code: str) -> None:
    body = ({"messages": ASK} if path == CHAT else {"prompt": "hi"}) | fields
    status = 404 if code == "model_not_found" else 400
    refused(app, app.test_client().post(path, json=body), status, code, param)


WHOLE: list[tuple[str, dict[str, Any], str | None, str]] = [
    (TEXT, {}, "prompt", "missing_required_parameter"),
    (TEXT, {"prompt": None}, "prompt", "missing_required_parameter"),
    (CHAT, {}, "messages", "missing_required_parameter"),
    (NATIVE, {}, None, "invalid_value"),
    (NATIVE, {"prompt": "x", "messages": ASK}, None, "invalid_value"),
    (TEXT, {"prompt": "x", "stream_options": {}}, None, "invalid_value"),
    (CHAT, {"messages": ASK, "top_logprobs": 1}, None, "invalid_value"),
    *(
        (path, {"prompt": prompt}, "prompt", "invalid_value")
        for path in (NATIVE, TEXT)
        for prompt in (
            "",
            [],
            [""],
            [[]],
            3,
            {},
            [1, "a"],
            [True],
            [1.0],
            [[1, False]],
        )
    ),
    (TEXT, {"prompt": [VOCABULARY]}, "prompt", "invalid_value"),
    (TEXT, {"prompt": [-1]}, "prompt", "invalid_value"),
    (TEXT, {"prompt": [10**25]}, "prompt", "invalid_value"),
    (TEXT, {"prompt": [1] * 8_192}, "prompt", "context_length_exceeded"),
    (TEXT, {"prompt": [1] * 5_000}, "prompt", "exceeds_kv_capacity"),
    (CHAT, {"messages": []}, "messages", "invalid_value"),
    (CHAT, {"messages": "hi"}, "messages", "invalid_value"),
    (CHAT, {"messages": [3]}, "messages.0", "invalid_value"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages.0.role", "missing_required_parameter"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content", "missing_required_parameter"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "invalid_value"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages.0", "invalid_value"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages.0.content", "invalid_value"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages.0.content",
        "invalid_value",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        "messages.0.tool_calls.0.id",
        "missing_required_parameter",
    ),
]


@pytest.mark.parametrize(("path", "body", "param", "code"), WHOLE)
def test_a_wrong_body_is_refused(
    app: Flask, path: str, body: dict[str, Any], param: str | None, code: str
) -> None:
    refused(app, app.test_client().post(path, json=body), 400, code, param)


RAW = [
    (b"", "invalid_json"),
    (b"{", "invalid_json"),
    (b"[1]", "invalid_json"),
    (b'"prompt"', "invalid_json"),
    (b"null", "invalid_json"),
    (b'{"prompt": "a",}', "invalid_json"),
    (b'{"prompt": "a", "temperature": NaN}', "invalid_json"),
    (b'{"prompt": "a", "unknown": -Infinity}', "invalid_json"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5_000 + b"}", "invalid_json"),
    (b'{"prompt": "\xff"}', "invalid_json"),
    (b"[" * 60_000, "invalid_json"),
    (b'{"prompt": "\\ud800"}', "invalid_unicode"),
    (b'{"prompt": "a", "\\udfff": 1}', "invalid_unicode"),
    (b'{"prompt": "a", "stop": ["\\ud800"]}', "invalid_unicode"),
]


@pytest.mark.parametrize(("raw", "code"), RAW)
@pytest.mark.parametrize("path", [NATIVE, TEXT, CHAT])
def test_what_is_no_json_is_refused(app: Flask, path: str, raw: bytes, code: str) -> None:
    response = app.test_client().post(path, data=raw, content_type="application/json")
    refused(app, response, 400, code)


def test_a_number_too_large_for_a_float_is_refused(app: Flask) -> None:
    raw = b'{"prompt": "a", "temperature": 1e999}'
    response = app.test_client().post(NATIVE, data=raw, content_type="application/json")
    refused(app, response, 400, "invalid_value", "temperature")


def test_a_body_too_large_is_refused(app: Flask) -> None:
    response = app.test_client().post(TEXT, json={"prompt": "a" * 70_000})
    refused(app, response, 413, "request_entity_too_large")


def test_another_content_type_is_refused(app: Flask) -> None:
    response = app.test_client().post(TEXT, data=b"<x/>", content_type="application/xml")
    refused(app, response, 415, "unsupported_media_type")


@pytest.mark.parametrize("key", ["", "k" * 256, "k\u00e9y"])
def test_a_wrong_idempotency_key_is_refused(app: Flask, key: str) -> None:
    response = app.test_client().post(NATIVE, json={"prompt": "a"}, headers={"Idempotency-Key": key})
    refused(app, response, 400, "invalid_value", "Idempotency-Key")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("wait=-1", "wait"),
        ("wait=61", "wait"),
        ("wait=nan", "wait"),
        ("wait=x", "wait"),
        ("after=-1", "after"),
        ("after=x", "after"),
        ("token_ids=maybe", "token_ids"),
    ],
)
def test_wrong_arguments_of_a_poll(app: Flask, query: str, param: str) -> None:
    refused(app, app.test_client().get(f"/v1/requests/req-1?{query}"), 400, "invalid_value", param)


@pytest.mark.parametrize("limit", ["0", "1001", "x", "-5"])
def test_wrong_limits_of_a_list(app: Flask, limit: str) -> None:
    refused(app, app.test_client().get(f"/v1/requests?limit={limit}"), 400, "invalid_value", "limit")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", TEXT, 405, "method_not_allowed"),
        ("PUT", NATIVE, 405, "method_not_allowed"),
        ("POST", "/v1/requests/req-1/stream", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
    ],
)
def test_wrong_paths_and_methods(app: Flask, method: str, path: str, status: int, code: str) -> None:
    refused(app, app.test_client().open(path, method=method), status, code)


def test_a_body_too_deep_for_who_goes_through_it_later(app: Flask) -> None:
    """It is read, and who makes a grammar of the same schema writes it a few calls further down."""
    client = app.test_client()
    tool = {"type": "function", "function": {"name": "f", "parameters": {"here": 1}}}
    asked = {"messages": ASK, "max_tokens": 8, "truncate_prompt_tokens": 8}
    body = json.dumps(asked | {"tools": [tool], "tool_choice": "required"})
    for depth in range(700, 1000):
        deep = body.replace('{"here": 1}', '{"a":' * depth + "1" + "}" * depth)
        response = client.post(CHAT, data=deep, content_type="application/json")
        assert response.status_code == 400, (depth, response.get_data(as_text=True))
