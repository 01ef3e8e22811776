"""How families of models write the calls of tools, told apart by what their chat templates hold."""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from app.tools.tool import Function
from relay.chat_template import ChatTemplate
from relay.grammar import JSON_SPACE, GrammarError, lark_grammar
from relay.tokenizer import Tokenizer

MOST_FORCED_CALLS = 16


class ToolFormat(NamedTuple):
    """Calls are JSON objects with a name and `arguments_key`, behind `start` and up to `end`.

    With `bare` an answer that begins like a JSON object is a call, too; with `leads` only an answer that
    begins with `start` holds calls. `opening`, `separator` and `closing` are what the model writes around
    several calls when it has to call. `python`: calls are those of a Python list.
    """

    name: str
    start: str
    separator: str
    opening: str = ""
    closing: str = ""
    end: str = ""
    arguments_key: str = "arguments"
    bare: bool = False
    leads: bool = False
    python: bool = False
    named: str = ""
    id_length: int = 24  # of a call's id


HERMES = ToolFormat(
    "hermes",
    start="<tool_call>",
    separator="\n</tool_call>\n<tool_call>\n",
    opening="<tool_call>\n",
    closing="\n</tool_call>",
    end="</tool_call>",
)
LLAMA3 = ToolFormat("llama3", start="<|python_tag|>", separator="; ", arguments_key="parameters", bare=True)
MISTRAL = ToolFormat(
    "mistral", start="[TOOL_CALLS]", separator=", ", opening="[TOOL_CALLS][", closing="]", id_length=9
)
MISTRAL_NAMED = ToolFormat(
    "mistral-named", start="[TOOL_CALLS]", separator="", opening="", named="[ARGS]", id_length=9
)
ARRAY = ToolFormat("array", start="[", separator=", ", opening="[", closing="]", leads=True)
PYTHON = ToolFormat("python", start="[", separator=", ", opening="[", closing="]", leads=True, python=True)
_PYTHON_IN_TEMPLATE = re.compile(r"\[\w+\(\w+=")
_ARRAY_IN_TEMPLATE = re.compile(r'\[\{\\?"name\\?": [^{}]*"arguments\\?":')


def tool_format(template: ChatTemplate) -> ToolFormat | None:
    """What a model with this template writes; HERMES for one that knows no tools, which is then told how.

    None: it knows them in a way that is not known here.
    """
    source = template.source
    if not template.knows_tools:
        return HERMES
    if "<function=" in source:
        return None
    if "[TOOL_CALLS]" in source:
        return MISTRAL_NAMED if MISTRAL_NAMED.named in source else MISTRAL
    if "<tool_call>" in source:
        return HERMES
    if _PYTHON_IN_TEMPLATE.search(source):
        return PYTHON
    if _ARRAY_IN_TEMPLATE.search(source):
        return ARRAY
    # Templates of others show what a tool is with its "parameters" as well.
    llama = "<|start_header_id|>" in source or "<|header_start|>" in source
    return LLAMA3 if "<|python_tag|>" in source or (llama and '"parameters"' in source) else None


def forced_calls(form: ToolFormat, functions: Sequence[Function], several: bool, tokenizer: Tokenizer) -> str:
    """The grammar of an answer that is a call of one of `functions`, or `several` calls."""
    most = MOST_FORCED_CALLS if several else 1
    if form.python:
        return _forced_python(form, functions, most)
    if form.named:
        start, mark = _mark(form.start, tokenizer), _mark(form.named, tokenizer)
        named = " | ".join(
            f"{start} {json.dumps(each.name)} {mark} {_json(_arguments(each))}" for each in functions
        )
        return lark_grammar(f"start: call{{1,{most}}}\ncall: {named}\n")
    schema = {"anyOf": [_call_schema(form, function) for function in functions]}
    opening = json.dumps(form.opening)
    if tokenizer.token_id(form.start) in tokenizer.special_ids:
        opening = f"{_mark(form.start, tokenizer)} {json.dumps(form.opening.removeprefix(form.start))}"
    more = f"({json.dumps(form.separator)} call){{0,{most - 1}}}" if several else ""
    return lark_grammar(f"start: {opening} call {more} {json.dumps(form.closing)}\ncall: {_json(schema)}\n")


def _forced_python(form: ToolFormat, functions: Sequence[Function], most: int) -> str:
    named = " | ".join(
        f'{json.dumps(each.name)} "(" {_python_arguments(_arguments(each))} ")"' for each in functions
    )
    more = f"({json.dumps(form.separator)} call){{0,{most - 1}}}" if most > 1 else ""
    opening, closing = json.dumps(form.opening), json.dumps(form.closing)
    return lark_grammar(f"start: {opening} call {more} {closing}\ncall: {named}\n")


def _python_arguments(schema: dict[str, Any]) -> str:
    """Those that must be given, then any of the others, in their order. Raises GrammarError."""
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    properties, must = schema.get("properties", {}), list(schema.get("required", ()))
    if odd := [name for name in must if not name.isidentifier()]:
        raise GrammarError(f"{odd[0]!r} is no name of an argument in Python, in which this model calls")
    argument = {
        name: f"{json.dumps(f'{name}=')} {_json(shared | properties.get(name, {}))}"
        for name in [*must, *properties]
        if name.isidentifier()
    }
    others = [argument[name] for name in argument if name not in must]
    behind = [f'(", " {each})?' for each in others]
    if must:
        return " ".join([' ", " '.join(argument[name] for name in must), *behind])
    led = [" ".join([first, *behind[i + 1 :]]) for i, first in enumerate(others)]
    return f"({' | '.join(led)})?" if led else ""


def _mark(text: str, tokenizer: Tokenizer) -> str:
    """In a grammar: no text stands for a special token."""
    marker = tokenizer.token_id(text)
    return f"<[{marker}]>" if marker in tokenizer.special_ids else json.dumps(text)


def _json(schema: dict[str, Any]) -> str:
    flexible = {"x-guidance": {"whitespace_flexible": True, "whitespace_pattern": JSON_SPACE}}
    return f"%json {json.dumps(schema | flexible)}"


def _arguments(function: Function) -> dict[str, Any]:
    return function.parameters or {"type": "object"}


def _call_schema(form: ToolFormat, function: Function) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, form.arguments_key: _arguments(function)},
        "required": ["name", form.arguments_key],
        "additionalProperties": False,
    }
