"""Answers made at random, in each family's way of writing calls: whatever the pieces, they are read alike."""

import json
import string
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.tools.tool_format import HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED, ToolFormat
from app.tools.tool_reply import ToolReply

NAMES = ("weather", "stop_now", "Größe.2")
LOOK = settings(max_examples=80, deadline=None, derandomize=True)
FAMILIES = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL, "named": MISTRAL_NAMED}
# What marks, calls and broken calls are made of, so that some come out by chance.
SCRAPS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "é", "🌍", "x", "NaN"),
        *("[TOOL_CALLS]weather[ARGS]", "[ARGS]", "[CALL_ID]a", "stop_now"),
        *("{", "}", "[", "]", '"', "\\", ",", ";", ": ", "\n", " "),
        *('{"name": "weather"', '"arguments": {}', '"parameters": {"a": 1}'),
        *('{"name": "weather", "arguments": {"city": "Rome"}}', '{"name": "nobody", "arguments": {}}'),
    ]
)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(), JSON_VALUES, max_size=4)
WORDS = st.text(string.ascii_letters + " .!äß🌍\n", max_size=20)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=4)
CUTS = st.lists(st.integers(0, 400), max_size=12)

Shown = tuple[str, list[dict[str, Any]]]


def pieces(text: str, cuts: list[int]) -> list[str]:
    at = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    return [text[start:stop] for start, stop in pairwise(at)]


def streamed(form: ToolFormat, parts: list[str]) -> Shown:
    """Content and calls, as a client adds up the deltas."""
    reply, content, calls = ToolReply(form, NAMES, True, "a"), "", list[dict[str, Any]]()
    for delta in [*(reply.delta(part) for part in parts), reply.last_delta("")]:
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls), "each call begins once, in order"
                calls.append({**call, "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return content, calls


def written(form: ToolFormat, calls: list[tuple[str, dict[str, Any]]], dumps: Any) -> str:
    if form.named:
        return "".join(f"{form.start}{name}{form.named}{dumps(arguments)}" for name, arguments in calls)
    each = [dumps({"name": name, form.arguments_key: arguments}) for name, arguments in calls]
    return f"{form.opening}{form.separator.join(each)}{form.closing}"


@pytest.mark.parametrize("form", FAMILIES.values(), ids=FAMILIES)
@LOOK
@given(
    before=WORDS,
    after=WORDS,
    calls=CALLS,
    cuts=CUTS,
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
def test_what_was_called_is_read(
    form: ToolFormat,
    before: str,
    after: str,
    calls: list[tuple[str, dict[str, Any]]],
    cuts: list[int],
    ascii_only: bool,
    indent: int | None,
) -> None:
    def dumps(call: dict[str, Any]) -> str:
        return json.dumps(call, ensure_ascii=ascii_only, indent=indent)

    mark = form.start if form.bare and before.strip() else ""
    answer = f"{before}{mark}{written(form, calls, dumps)}{after}"
    content, found = streamed(form, pieces(answer, cuts))
    assert [call["function"]["name"] for call in found] == [name for name, _ in calls]
    assert [json.loads(call["function"]["arguments"]) for call in found] == [each for _, each in calls]
    assert "".join(content.split()) == "".join(f"{before}{after}".split())
    whole = ToolReply(form, NAMES, True, "a").message(answer)
    assert (whole["content"] or "") == content
    assert [call["function"] for call in whole["tool_calls"]] == [call["function"] for call in found]


@pytest.mark.parametrize("form", FAMILIES.values(), ids=FAMILIES)
@LOOK
@given(scraps=st.lists(SCRAPS, max_size=24), cuts=CUTS)
def test_any_pieces_give_the_same(form: ToolFormat, scraps: list[str], cuts: list[int]) -> None:
    answer = "".join(scraps)
    whole = streamed(form, [answer])
    assert streamed(form, pieces(answer, cuts)) == whole
    assert streamed(form, list(answer)) == whole
    told = ToolReply(form, NAMES, True, "a").message(answer)
    for call in told.get("tool_calls", ()):
        assert call["function"]["name"] in NAMES
        assert isinstance(json.loads(call["function"]["arguments"], parse_constant=pytest.fail), dict)
    if not told.get("tool_calls"):
        assert told["content"] == answer, "what is no call is text, to the last character"


@pytest.mark.parametrize("form", FAMILIES.values(), ids=FAMILIES)
@LOOK
@given(text=st.lists(SCRAPS, max_size=12).map("".join))
def test_nothing_is_held_back_for_ever(form: ToolFormat, text: str) -> None:
    """Behind an empty line of prose all of an answer without calls has been told."""
    prose = "\n\nThis is prose, and no mark begins like it"
    reply = ToolReply(form, NAMES, True, "a")
    told = reply.delta(text + prose)
    if "tool_calls" not in told:
        rest = reply.last_delta("").get("content", "")
        assert told.get("content", "") + rest == text + prose
