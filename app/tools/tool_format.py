"""How families of models write the calls of tools, told apart by what their chat templates hold."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from app.tools.tool import Function
from relay.chat_template import ChatTemplate
from relay.grammar import JSON_SPACE, lark_grammar
from relay.tokenizer import Tokenizer

MOST_FORCED_CALLS = 16


class ToolFormat(NamedTuple):
    """Calls are JSON objects with a name and `arguments_key`, behind `start` and up to `end`.

    With `bare` an answer that begins like a JSON object is a call, too. `opening`, `separator` and `closing`
    are what the model writes around several calls when it has to call.
    """

    name: str
    start: str
    separator: str
    opening: str = ""
    closing: str = ""
    end: str = ""
    arguments_key: str = "arguments"
    bare: bool = False
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
    # Templates of others show what a tool is with its "parameters" as well.
    llama = "<|start_header_id|>" in source or "<|header_start|>" in source
    return LLAMA3 if "<|python_tag|>" in source or (llama and '"parameters"' in source) else None


def forced_calls(form: ToolFormat, functions: Sequence[Function], several: bool, tokenizer: Tokenizer) -> str:
    """The grammar of an answer that is a call of one of `functions`, or `several` calls."""
    most = MOST_FORCED_CALLS if several else 1
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
