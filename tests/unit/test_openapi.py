"""The OpenAPI document: it has every route, is valid, and allows what the gateway allows."""

import re
from typing import Any

import jsonschema
import pytest
from flask import Flask
from openapi_spec_validator import validate

from app.fields.schema import parse
from app.gateway.errors import ApiError
from app.gateway.gateway import RESOURCES
from app.openapi.openapi import document
from app.openapi.operations import OPERATIONS

DOCUMENT = document("a-model")
BODIES = {op.path: op.body for op in OPERATIONS if op.body is not None and not isinstance(op.body, str)}
ASK = [{"role": "user", "content": "hi"}]


def test_it_has_every_route_and_no_other() -> None:
    app = Flask("paths", static_folder=None)
    for module in RESOURCES:
        app.register_blueprint(module.resource)
    routes = {
        (method, re.sub(r"<(?:path:)?(\w+)>", r"{\1}", rule.rule))
        for rule in app.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
        if not rule.rule.startswith(("/docs", "/openapi.json", "/console/"))
    }
    assert {(op.method, op.path) for op in OPERATIONS} == routes


def test_it_is_a_valid_document() -> None:
    validate(DOCUMENT)


def allows(path: str, body: Any) -> bool:
    content = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]
    whole = content["application/json"]["schema"] | {"components": DOCUMENT["components"]}
    try:
        jsonschema.validate(body, whole, jsonschema.Draft202012Validator)
    except jsonschema.ValidationError:
        return False
    return True


def takes(path: str, body: dict[str, Any]) -> bool:
    try:
        parse(BODIES[path], {name: value for name, value in body.items() if value is not None})
    except ApiError:
        return False
    return True


@pytest.mark.parametrize(
    ("path", "body", "fine"),
    [
        ("/v1/completions", {"prompt": "a"}, True),
        ("/v1/completions", {"prompt": ["a", "b"]}, True),
        ("/v1/completions", {"prompt": [1, 2]}, True),
        ("/v1/completions", {"prompt": [[1], [2]], "unknown": 1}, True),
        ("/v1/completions", {"prompt": "a", "stop": "x", "logit_bias": {"5": 1}, "seed": None}, True),
        ("/v1/completions", {"prompt": "a", "stop": ["x", "y"]}, True),
        ("/v1/completions", {}, False),
        ("/v1/completions", {"prompt": {}}, False),
        ("/v1/completions", {"prompt": "a", "temperature": 3}, False),
        ("/v1/completions", {"prompt": "a", "temperature": "1"}, False),
        ("/v1/completions", {"prompt": "a", "stop": 3}, False),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"5": 200}}, False),
        ("/v1/chat/completions", {"messages": ASK}, True),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
            True,
        ),
        ("/v1/chat/completions", {"messages": [{"role": "nobody", "content": "a"}]}, False),
        ("/v1/chat/completions", {"messages": ASK, "top_logprobs": 21, "logprobs": True}, False),
        ("/v1/requests", {"messages": ASK, "timeout": 3.5}, True),
        ("/v1/requests", {"prompt": "a", "timeout": 0}, False),
        ("/tokenize", {"prompt": "a"}, True),
        ("/detokenize", {"tokens": ["a"]}, False),
        ("/generate", {"text": ["a"]}, True),
        ("/generate", {"text": 3}, False),
    ],
)
def test_it_allows_what_the_gateway_takes(path: str, body: dict[str, Any], fine: bool) -> None:
    assert takes(path, body) is fine
    assert allows(path, body) is fine
