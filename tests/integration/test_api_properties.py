"""Requests drawn from the OpenAPI document, right and wrong ones: no reply is a 5xx or breaks the document.

Behind the gateway a scripted worker answers at once. (https://schemathesis.readthedocs.io)
"""

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings, strategies
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from app.gateway.gateway import create_app
from app.gateway.service import KEY
from app.openapi.operations import OPERATIONS
from relay.request import Finish
from relay.rooms import Rooms
from relay.settings import Settings
from tests.gateway_rig import Answering, ScriptedWorker, default_tokenizer, words
from tests.servers import RedisServer

MODEL = f"properties-{secrets.token_hex(4)}"
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def document(valkey: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The document of a gateway that serves."""
    folder: Path = tmp_path_factory.mktemp("files")
    app = create_app(
        Settings(redis_url=valkey.url, served_name=MODEL, files_url=str(folder)), ring=lambda ring: None
    )
    rooms = Rooms(valkey.url, MODEL)
    answer = words(default_tokenizer(), " a small answer", logprobs=True)
    with ScriptedWorker(rooms) as worker, Answering(worker, answer, Finish("stop")).running():
        yield schemathesis.openapi.from_wsgi("/openapi.json", app)
    app.extensions[KEY].close()
    rooms.close()


# Flushing needs workers that are real, and what a live stream sends is no JSON.
TRIED = [
    op
    for op in OPERATIONS
    if op.tag != "admin" and op.reply != "text/event-stream" and not isinstance(op.body, str)
]
DRAWN = [(op.method, op.path, GenerationMode.POSITIVE) for op in TRIED] + [
    (op.method, op.path, GenerationMode.NEGATIVE) for op in TRIED if op.body or op.query
]


@pytest.mark.parametrize(("method", "path", "mode"), DRAWN)
@given(data=strategies.data())
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
def test_every_reply_is_as_documented(
    document: Any, method: str, path: str, mode: GenerationMode, data: strategies.DataObject
) -> None:
    case = data.draw(document[path][method].as_strategy(generation_mode=mode))
    case.call_and_validate(checks=CHECKS)
