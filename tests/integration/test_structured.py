"""Structured answers of the real model over the whole relay, asked for by the `openai` client."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.gateway_rig import GatewayProcess
from tests.relay_rig import Relay
from tests.servers import RedisServer

MODEL = "structured"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "minItems": 8, "maxItems": 8},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ASK: Any = [{"role": "user", "content": "Invent a person. Answer in JSON."}]


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int


@pytest.fixture(scope="module")
def relay(valkey: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    relay = Relay(valkey, tmp_path_factory.mktemp("relay"), MODEL)
    relay.start("prefill", "decode")
    relay.ready()
    yield relay
    relay.close()


@pytest.fixture(scope="module")
def gateway(valkey: RedisServer, relay: Relay, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with GatewayProcess(valkey.url, MODEL, tmp_path_factory.mktemp("gateway") / "log") as process:
        yield process


@pytest.fixture(scope="module")
def client(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def form(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


@pytest.mark.parametrize("more", [{"temperature": 0}, {"temperature": 1.5, "seed": 3}])
def test_an_answer_follows_its_schema(client: openai.OpenAI, more: dict[str, Any]) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=ASK, response_format=form(SCHEMA), max_tokens=200, logprobs=True, **more
    )
    (choice,) = reply.choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
    assert choice.logprobs
    assert reply.usage
    assert len(choice.logprobs.content or ()) == reply.usage.completion_tokens


def test_the_client_parses_into_its_own_class(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=Person, max_tokens=100, temperature=0
    )
    assert isinstance(reply.choices[0].message.parsed, Person)


def test_any_json_object(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=ASK, response_format={"type": "json_object"}, max_tokens=200, temperature=0
    )
    text = reply.choices[0].message.content or ""
    if reply.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)
    else:
        assert text.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"),
        ({"guided_regex": r"[A-Z][a-z]{2,5} \d{4}"}, r"[A-Z][a-z]{2,5} \d{4}"),
        ({"ebnf": 'root ::= "yes" | "no" ", because " [a-z ]{5,20} "."'}, r"yes|no, because [a-z ]{5,20}\."),
    ],
)
def test_choices_expressions_and_grammars(
    client: openai.OpenAI, fields: dict[str, Any], pattern: str
) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="My favourite is", extra_body=fields, temperature=0, max_tokens=60, stream=True
    )
    choices = [chunk.choices[0] for chunk in stream]
    assert re.fullmatch(pattern, "".join(choice.text for choice in choices))
    assert choices[-1].finish_reason == "stop"


def test_a_grammar_outlives_its_worker(client: openai.OpenAI, relay: Relay, tmp_path: Path) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": ASK,
        "response_format": form(SCHEMA),
        "max_tokens": 200,
        "temperature": 0,
    }
    undisturbed = client.chat.completions.create(**asked).choices[0].message.content
    pieces = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        pieces.append(chunk.choices[0].delta.content or "")
        if len(pieces) == 12:  # in the middle of the answer
            (doomed,) = (worker for worker in relay.workers if worker.role == "decode")
            relay.workers.remove(doomed)
            doomed.send(signal.SIGKILL)
            relay.start("decode")
    assert "".join(pieces) == undisturbed
    jsonschema.validate(json.loads("".join(pieces)), SCHEMA)
    newest = relay.rooms.list_requests(1)[0]
    assert newest.attempts > 1
