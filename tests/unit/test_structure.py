"""The forms of an answer: every spelling makes the grammar it says, and what is wrong with one is named."""

from typing import Any

import pytest

from app.fields.schema import ChatBody, CompletionBody, NativeBody, parse
from app.gateway.body import read_body
from app.gateway.errors import ApiError
from relay.grammar import (
    Grammars,
    choice_grammar,
    json_grammar,
    regex_grammar,
    rules_grammar,
)
from relay.model_file import default_model_path
from relay.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(default_model_path())
GRAMMARS = Grammars(TOKENIZER, TOKENIZER.vocab_size)
SCHEMA = {"type": "object", "properties": {"a": {"const": None}, "b": {"enum": [None, 1]}}, "required": ["a"]}
TEXT = '{"type": "object", "properties": {"a": {"const": null}, "b": {"enum": [null, 1]}}, "required": ["a"]}'
EBNF = 'root ::= "a" | "b"'


def grammar(fields: dict[str, Any], kind: type[Any] = CompletionBody) -> str | None:
    given = {"messages": [{"role": "user", "content": "x"}]} if kind is ChatBody else {"prompt": "x"}
    body = parse(kind, given | fields)
    return body.params(100, 7, TOKENIZER, GRAMMARS).grammar


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody, NativeBody])
@pytest.mark.parametrize(
    ("fields", "made"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, json_grammar({"type": "object"})),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            json_grammar(SCHEMA),
        ),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, json_grammar(SCHEMA)),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, json_grammar(SCHEMA)),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, json_grammar({})),
        ({"structured_outputs": {"json": SCHEMA}}, json_grammar(SCHEMA)),
        ({"structured_outputs": {"json": TEXT}}, json_grammar(SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, json_grammar({"type": "object"})),
        ({"structured_outputs": {"regex": "a+"}}, regex_grammar("a+")),
        ({"structured_outputs": {"choice": ["a", 'b"']}}, choice_grammar(["a", 'b"'])),
        ({"structured_outputs": {"grammar": EBNF}}, rules_grammar(EBNF)),
        ({"guided_json": SCHEMA}, json_grammar(SCHEMA)),
        ({"guided_regex": "a+"}, regex_grammar("a+")),
        ({"guided_choice": ["a"]}, choice_grammar(["a"])),
        ({"guided_grammar": 'start: "a"'}, rules_grammar('start: "a"')),
        ({"json_schema": TEXT}, json_grammar(SCHEMA)),
        ({"regex": "a+"}, regex_grammar("a+")),
        ({"ebnf": EBNF}, rules_grammar(EBNF)),
    ],
)
def test_every_spelling_makes_its_grammar(kind: type[Any], fields: dict[str, Any], made: str | None) -> None:
    assert grammar(fields, kind) == made


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format", "schema goes with"),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
            "response_format",
            "json_schema goes with",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "is required",
        ),
        ({"guided_json": {"type": "nope"}}, "guided_json", "Invalid type: nope"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_json": "[]"}, "guided_json", "must be a JSON object"),
        ({"guided_json": {"if": {}}}, "guided_json", "Unimplemented keys"),
        ({"guided_json": {"$ref": "http://127.0.0.1:1/x"}}, "guided_json", "http://127.0.0.1:1/x"),
        ({"regex": "((("}, "regex", "unclosed group"),
        ({"regex": "(a|[^x]{0,1000}){0,1000}y{5,100000}"}, "regex", "too many"),
        ({"regex": "x" * 70_000}, "regex", "larger than 65536 bytes"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"guided_choice": [1]}, "guided_choice.0", "string"),
        ({"ebnf": 'root ::= "a'}, "ebnf", "Unexpected end"),
        ({"ebnf": "start: nowhere"}, "ebnf", "nowhere"),
        *(({name: " "}, name, "No 'root' rule") for name in ("ebnf", "grammar", "guided_grammar")),
        ({"ebnf": "root ::= " + "(" * 3_000}, "ebnf", ""),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "combined"),
        ({"structured_outputs": {}}, "structured_outputs", "one of json, json_object, regex, choice"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "asks for nothing"),
        (
            {"regex": "a", "response_format": {"type": "json_object"}},
            "response_format",
            "cannot be combined with regex",
        ),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str, told: str) -> None:
    with pytest.raises(ApiError) as caught:
        grammar(fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert told in caught.value.message
    assert len(caught.value.message) < 500


def test_null_is_a_value_in_a_schema_and_absent_elsewhere() -> None:
    raw = f'{{"prompt": "x", "regex": null, "guided_json": {TEXT}}}'.encode()
    assert grammar(read_body(raw, None).fields) == json_grammar(SCHEMA)
