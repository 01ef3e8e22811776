"""How one call is written in a grammar: what stands up to its arguments, and these."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from app.tools.tool import Function
from app.tools.tool_format import ToolFormat
from relay.grammar import JSON_SPACE, GrammarError, json_rule
from relay.tokenizer import Tokenizer

SPACE = f"({JSON_SPACE})?"  # a regular expression
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
# What a schema may say of the arguments of a call in Python, and what says nothing of them.
_IN_PYTHON = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_NOTES = {"title", "description", "default", "examples", "deprecated", "$schema", "$id", "$comment"}


def calls(form: ToolFormat, functions: Sequence[Function], before_first: str | None) -> Iterator[str]:
    """Rule `call`, of any of the functions. With `before_first`, an expression, also `first`: a call whose
    beginning is one lexeme with what stands before it."""
    yield f"SPACE: /{SPACE}/"
    if not form.named and not form.python:
        yield rf'OPENED: /{SPACE}\{{{SPACE}"name"{SPACE}:{SPACE}/'
        yield rf"CLOSED: /{SPACE}\}}/"
        yield rf'KEY: /{SPACE},{SPACE}"{form.arguments_key}"{SPACE}:{SPACE}/'
    for i, function in enumerate(functions):
        yield f"CALL_{i}: {_head(form, function)}"
    yield f"call: {' | '.join(f'CALL_{i} arguments_{i}' for i in range(len(functions)))}"
    if before_first is not None:
        yield f"BEFORE: /{before_first}/"
        yield from (f"FIRST_{i}: BEFORE CALL_{i}" for i in range(len(functions)))
        yield f"first: {' | '.join(f'FIRST_{i} arguments_{i}' for i in range(len(functions)))}"


def arguments(
    form: ToolFormat, schemas: Sequence[dict[str, Any] | None], tokenizer: Tokenizer
) -> Iterator[str]:
    """A rule for each schema, up to the end of its call; None: any arguments. Raises GrammarError."""
    for i, schema in enumerate(schemas):
        yield f"arguments_{i}: {_arguments(form, schema, tokenizer)}"


def written(form: ToolFormat, text: str, tokenizer: Tokenizer) -> str:
    """`text` in a grammar, with tokens for the special ones in it, for which no text stands."""
    marks = [mark for mark in form.marks if tokenizer.is_special(mark)]
    parts = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
    return " ".join(
        f"<[{tokenizer.token_id(part)}]>" if part in marks else json.dumps(part) for part in parts if part
    )


def loose(text: str) -> str:
    """`text` in a grammar with whatever space around it; nothing for space alone."""
    return f"/{SPACE}{escaped(text.strip())}/" if text.strip() else ""


def escaped(text: str) -> str:
    """As part of an expression between slashes."""
    return re.escape(text).replace("/", r"\/")


def _head(form: ToolFormat, function: Function) -> str:
    """The terminal of a call up to its arguments."""
    if form.named:
        return f"SPACE {json.dumps(function.name)}"
    if form.python:
        return f"SPACE {json.dumps(f'{function.name}(')}"
    return f"OPENED {json.dumps(json.dumps(function.name))} KEY"


def _arguments(form: ToolFormat, schema: dict[str, Any] | None, tokenizer: Tokenizer) -> str:
    if form.python:
        return f'{_python_arguments(schema)} ")"'
    if form.named:
        return f"{written(form, form.named, tokenizer)} {json_rule(schema or _ANY_OBJECT)}"
    return f"{json_rule(schema or _ANY_OBJECT)} CLOSED"


def _python_arguments(schema: dict[str, Any] | None) -> str:
    """Those that must be given, then any of the others, in their order. Raises GrammarError."""
    if schema is None:
        each = f"/[A-Za-z_][A-Za-z0-9_]{{0,63}}=/ {json_rule({})}"
        return f'({each} (", " {each})*)?'
    properties, must = _named(schema)
    shared: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    argument = {
        name: f"{json.dumps(f'{name}=')} {json_rule(_with(shared, properties.get(name, {})))}"
        for name in [*must, *properties]
        if name.isidentifier()
    }
    others = [argument[name] for name in argument if name not in must]
    behind = [f'(", " {each})?' for each in others]
    if must:
        return " ".join([' ", " '.join(argument[name] for name in must), *behind])
    led = [" ".join([first, *behind[i + 1 :]]) for i, first in enumerate(others)]
    return f"({' | '.join(led)})?" if led else ""


def _named(schema: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The properties of an object, and the names of those it must have. Raises GrammarError for what a call
    in Python cannot follow."""
    properties, must = schema.get("properties", {}), schema.get("required", [])
    if unknown := schema.keys() - _IN_PYTHON - _NOTES:
        raise GrammarError(f"{min(unknown)!r} cannot be followed in Python, in which this model calls")
    if schema.get("type", "object") != "object":
        raise GrammarError("arguments are an object, and the schema is of something else")
    if not isinstance(properties, dict) or not isinstance(must, list):
        raise GrammarError("properties must be an object, and required a list")
    if odd := [name for name in must if not isinstance(name, str) or not name.isidentifier()]:
        raise GrammarError(f"{odd[0]!r} is no name of an argument in Python, in which this model calls")
    return properties, list(dict.fromkeys(must))


def _with(shared: dict[str, Any], schema: Any) -> Any:
    return shared | schema if isinstance(schema, dict) else schema
