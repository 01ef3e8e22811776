"""Answers of models that may call strict functions: any text, and no call that is against its schema."""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers

from app.api.chat import ChatView
from app.fields.schema import ChatBody, parse
from app.gateway.errors import ApiError
from app.generation.shown_prompt import ShownPrompt
from app.response.response_body import as_chat, in_terms_of_a_response, parse_response
from app.response.response_items import items_of
from app.tools.call_grammar import forced_calls, text_or_calls
from app.tools.tool import Function
from app.tools.tool_format import (
    ARRAY,
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_NAMED,
    PYTHON,
    ToolFormat,
)
from app.tools.tool_parser import ToolParser
from app.tools.tool_reply import ToolReply
from relay.grammar import GrammarError, Grammars, regex_grammar
from relay.request import State
from relay.tokenizer import Tokenizer
from relay.tokens import End
from tests.grammars import grammars, tokenizer

FORMS = (HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED, ARRAY, PYTHON)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"enum": [1, 2]}},
}
WEATHER = Function(name="weather", parameters=SCHEMA, strict=True)
STOP = Function(name="stop_now")
BOTH = [WEATHER, STOP]
GOOD, BAD = '{"city": "Ro{m}e", "days": 2}', '{"city": "Rome", "days": 3}'
ASK: Any = [{"role": "user", "content": "How is Rome?"}]


def allows(mask: bytes, token: int) -> bool:
    return bool(mask[token // 8] >> token % 8 & 1)


def refused(grammar: str, text: str) -> str | None:
    """What is left of `text` from the first token on that may not come. None: it may come as a whole, and
    end there."""
    grammars().check(grammar)
    matcher = grammars().matcher(grammar)
    ids = tokenizer().encode(text, add_special_tokens=False)
    for i, token in enumerate(ids):
        if not allows(matcher.compute_bitmask(), token):
            return tokenizer().decode(ids[i:])
        assert matcher.consume_token(token)
    return None if allows(matcher.compute_bitmask(), min(tokenizer().eos_ids)) else ""


TEXTS = [
    "",
    "Rome is sunny: 31 °C in 東京 too, \U0001f600\U0001f468\u200d\U0001f469 and \u0301 x\x00y\r\n\t",
    "a < b, <b>, <tool, <tool_call, <tool_<tool_call, </tool_call>, <|python_tag, [TOOL_CALLS, [ARGS]",
    '{"city": "Rome"} is JSON, and {"name": "weather"} is some more',
    '[1, {"a": 2}] is a list, and [weather, stop_now] is one',
    "\n\n [weather] \n{",
    '{"name": "Bob"}',
    '[{"name": "weatherman"}]',
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_any_text_may_come_and_end_anywhere(form: ToolFormat, several: bool, text: str) -> None:
    held_by_its_beginning = form is LLAMA3 and text.startswith('{"city"')
    grammar = text_or_calls(form, BOTH, several, tokenizer())
    assert (refused(grammar, text) is None) != held_by_its_beginning
    matcher = grammars().matcher(grammar)
    (eos, *_), written = tokenizer().eos_ids, b""
    for token in [] if held_by_its_beginning else tokenizer().encode(text, add_special_tokens=False):
        assert matcher.consume_token(token)
        written += tokenizer().token_bytes(token)
        assert allows(matcher.compute_bitmask(), eos) == whole(written)


def whole(text: bytes) -> bool:
    try:
        return bool(text.decode()) or True
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_within_a_text_any_token_may_come(form: ToolFormat) -> None:
    """But for a half of a character without its other one."""
    matcher = grammars().matcher(text_or_calls(form, BOTH, True, tokenizer()))
    assert matcher.consume_tokens(tokenizer().encode("So:", add_special_tokens=False))
    mask = matcher.compute_bitmask()
    forbidden = {i for i in range(tokenizer().vocab_size) if not allows(mask, i)}
    assert all(begins_amid_a_character(tokenizer().token_bytes(i)) for i in forbidden)
    assert len(forbidden) < tokenizer().vocab_size // 20


def begins_amid_a_character(token: bytes) -> bool:
    """Or holds what no text does."""
    try:
        token.decode()
    except UnicodeDecodeError as error:
        return error.reason != "unexpected end of data"
    return False


CALLS = {
    HERMES.name: '<tool_call>\n{{"name": "weather", "arguments": {}}}\n</tool_call>',
    LLAMA3.name: '{{"name": "weather", "parameters": {}}}',
    MISTRAL.name: '[TOOL_CALLS] [{{"name": "weather", "arguments": {}}}]',
    MISTRAL_NAMED.name: "[TOOL_CALLS]weather[ARGS]{}",
    ARRAY.name: ' [{{"name": "weather", "arguments": {}}}]',
    PYTHON.name: '[weather(city="Rome", days={})]',
}
MORE = {
    HERMES.name: ' Then:<tool_call>{"name": "stop_now", "arguments": {"why": [1, null]}}</tool_call> Done.',
    LLAMA3.name: '; {"name": "stop_now", "parameters": {"why": [1, null]}}',
    MISTRAL_NAMED.name: '[TOOL_CALLS]stop_now[ARGS]{"why": [1, null]}',
    PYTHON.name: ", stop_now(why=[1, null])]",
}
IN_LIST = ', {"name": "stop_now", "arguments": {"why": [1, null]}}]'


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_call_follows_its_schema(form: ToolFormat) -> None:
    good, bad = ("2", "3") if form.python else (GOOD, BAD)
    texts = ["" if form.leads or form.bare else "Let me see. "]
    if form.bare:
        texts.append(f"Let me see. {form.start}")
    for before in texts:
        call = before + CALLS[form.name].format(good)
        both = call.removesuffix("]") + MORE.get(form.name, IN_LIST)
        several = text_or_calls(form, BOTH, True, tokenizer())
        one = text_or_calls(form, BOTH, False, tokenizer())
        assert refused(several, call) is None
        assert refused(one, call) is None
        assert refused(several, both) is None
        assert refused(one, both), "where one call is wanted, it is the end"
        assert "3" in (refused(several, before + CALLS[form.name].format(bad)) or "")
        assert refused(several, before + CALLS[form.name].replace("weather", "whether").format(good)) or (
            form.bare or form.leads
        )
        assert refused(several, call[:-1]) == "", "a call that has begun is finished"


def test_behind_a_mark_a_call_has_to_come() -> None:
    grammar = text_or_calls(HERMES, BOTH, True, tokenizer())
    assert refused(grammar, "I write <tool_call> so") == " so"
    assert refused(grammar, "<tool_call>\n</tool_call>")


# ---- what the parser takes for a call

SPECIAL = ["<s>", "</s>", "<think>"]
RIGHT, WRONG = '{"city": "a", "days": 1}', '{"city": 1}'
WHOLE = [
    f'{led}{{"name": "weather", "{key}": {given}}}'
    for key, led in (("arguments", ""), ("arguments", "["), ("parameters", ""))
    for given in (RIGHT, WRONG)
]
SCRAPS = [
    *'013abc "{}[](),:;=\\\n<',
    *("<tool_call>", "<tool", "_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[TOOL_", "CALLS]"),
    *(
        "[ARGS]",
        "[CALL_ID]",
        "weather",
        "stop_now",
        '"name"',
        '"arguments"',
        '"parameters"',
        '"city"',
        '"days"',
    ),
    *(': "', '", "', ', "arguments": {}}', ', "parameters": {}}', "\\u0077eather", " = ", "\x1f", "\u2003"),
    *(f'{{"{key}": {WRONG}, "name": "weather"}}' for key in ("arguments", "parameters")),
    *(
        "[weather(city=1)",
        '[weather(city="a", days=1)',
        "weather(city=",
        "stop_now(",
        "weather[ARGS]{}",
        RIGHT,
    ),
    *(f"weather[ARGS]{RIGHT}", "[TOOL_CALLS]weather[ARGS]{}", f"<|python_tag|>{WHOLE[-1]}", *WHOLE),
    *(WHOLE[1].replace("wea", "\\u0077ea"), WHOLE[-1].replace("wea", "\\u0077ea")),
]


def scraps_tokenizer(marks: bool) -> Tokenizer:
    """Of tokens from which calls come up by chance, and with which what starts a call is a special one."""
    special = [*SPECIAL, *(["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "</tool_call>"] if marks else [])]
    tokens = dict.fromkeys([*special, *SCRAPS, *map(chr, range(128))])
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={each: i for i, each in enumerate(tokens)}, merges=[])
    )
    backend.add_special_tokens(special)
    return Tokenizer(backend, special_tokens={}, eos_ids={1}, chat_template=None)


@pytest.mark.parametrize("marks", [False, True], ids=["", "special"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_nothing_that_is_read_as_a_call_breaks_its_schema(form: ToolFormat, marks: bool) -> None:
    some = scraps_tokenizer(marks)
    shown = any(some.is_special(mark) for mark in form.marks)
    texts = Grammars(some, some.vocab_size)
    grammar = text_or_calls(form, BOTH, True, some)
    texts.check(grammar)

    scraps = (some.token_id(SCRAPS[-1]) or 0) + 1

    def calls(held: bool, seed: int) -> list[bool]:
        """Of each call of `weather` in an answer drawn at random: whether it follows its schema."""
        draw, matcher, text = random.Random(seed), texts.matcher(grammar), ""
        for _ in range(30):
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(mask, bitorder="little").nonzero()[0] if held else range(scraps)
            token = int(draw.choice([i for i in allowed if i < scraps] or allowed))
            if token in some.eos_ids:
                break
            if held:
                assert matcher.consume_token(token)
            text += some.token_text(token) if shown or token not in some.special_ids else ""
        parser, found = ToolParser(form, {"weather", "stop_now"}), dict[int, list[str]]()
        for piece in [*parser.push(text), *parser.flush()]:
            if piece.name is not None:
                found[piece.call] = [piece.name]
            elif piece.call >= 0:
                found[piece.call].append(piece.arguments)
        whole_calls = list(found.values())[: parser.calls]
        return [follows("".join(said)) for name, *said in whole_calls if name == "weather"]

    held = [good for seed in range(400) for good in calls(True, seed)]
    free = [good for seed in range(400) for good in calls(False, seed)]
    assert all(held)
    assert len(held) > 3
    assert not all(free), "these scraps make wrong calls"


def follows(arguments: str) -> bool:
    return jsonschema.Draft202012Validator(SCHEMA).is_valid(json.loads(arguments))


# ---- fields

STRICT: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
LOOSE: Any = {"type": "function", "function": {"name": "stop_now"}}
ODD: Any = {"name": "odd", "parameters": {"type": "object", "not": {}}}


def grammar(**fields: Any) -> str | None:
    return parse(ChatBody, {"messages": ASK, **fields}).params(10, 1, tokenizer(), grammars()).grammar


def response_grammar(*functions: dict[str, Any], **fields: Any) -> str | None:
    tools = [{"type": "function", **each} for each in functions]
    fields = {"input": "How is Rome?", "tools": tools, **fields}
    with in_terms_of_a_response():
        chat = as_chat(parse_response(fields), fields, items_of("How is Rome?"))
        return chat.params(10, 1, tokenizer(), grammars()).grammar


def test_without_a_strict_function_there_is_no_grammar() -> None:
    odd = {"type": "function", "function": ODD}
    assert grammar(tools=[LOOSE, odd]) is None
    assert grammar(tools=[STRICT], tool_choice="none") is None
    assert grammar(tools=[STRICT, odd]) == text_or_calls(
        HERMES, [WEATHER, Function(**ODD)], True, tokenizer()
    )
    assert grammar(tools=[STRICT, LOOSE], parallel_tool_calls=False) == text_or_calls(
        HERMES, BOTH, False, tokenizer()
    )
    assert grammar(tools=[STRICT], tool_choice="required") == forced_calls(
        HERMES, [WEATHER], True, tokenizer()
    )


def test_the_field_of_a_schema_that_cannot_be_followed_is_named() -> None:
    odd = {"type": "function", "function": ODD | {"strict": True}}
    for more in ({}, {"tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
        with pytest.raises(ApiError, match=r"tools\.1\.function\.parameters: .*not") as caught:
            grammar(tools=[STRICT, odd], **more)
        assert (caught.value.status, caught.value.param) == (400, "tools.1.function.parameters")
    with pytest.raises(ApiError) as caught:
        response_grammar(ODD | {"strict": True})
    assert caught.value.param == "tools.0.parameters"
    assert caught.value.message.startswith("tools.0.parameters: ")


def test_functions_of_a_response_are_strict_unless_they_say_no_or_cannot_be() -> None:
    weather = {"name": "weather", "parameters": SCHEMA}
    followed = text_or_calls(HERMES, [WEATHER], True, tokenizer())
    assert response_grammar(weather) == followed
    assert response_grammar(weather | {"strict": None}) == followed
    assert response_grammar(weather | {"strict": False}) is None
    assert response_grammar(weather, ODD) is None
    assert response_grammar(weather | {"strict": True}, ODD) is not None
    assert response_grammar(weather, regex="a+") == regex_grammar("a+")


def test_an_answer_in_a_form_of_its_own_may_be_calls_instead() -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["<tool_call>"]}}}
    both = grammar(tools=[STRICT, LOOSE], response_format=form)
    assert both
    call = CALLS[HERMES.name].format(GOOD)
    assert refused(both, '"<tool_call>"') is None
    assert refused(both, call) is None
    assert refused(both, f"{call}\n{call}") is None
    assert "3" in (refused(both, CALLS[HERMES.name].format(BAD)) or "")
    assert refused(both, "Rome") == "Rome"
    one = grammar(tools=[STRICT], response_format=form, parallel_tool_calls=False)
    assert one
    assert refused(one, call) is None
    assert refused(one, f"{call}\n{call}")
    with pytest.raises(ApiError, match="regex cannot be combined with tools"):
        grammar(tools=[STRICT], regex="a+")
    with pytest.raises(ApiError, match="cannot be told from a call"):
        grammar(tools=[STRICT], response_format=form, chat_template="{{ tools }}<|python_tag|>")
    with pytest.raises(ApiError, match="response_format") as caught:
        grammar(tools=[STRICT], response_format={"type": "json_object", "schema": {"not": {}}})
    assert caught.value.param == "response_format"


def test_what_the_client_wrote_is_no_call_of_the_model() -> None:
    """Its beginning was no part of the grammar."""
    body = parse(ChatBody, {"messages": ASK})
    prompt = ShownPrompt((), body.shown, tokenizer(), lambda: None)
    call = CALLS[HERMES.name].format(BAD)
    echo, text = call[:30], call[30:]
    view = ChatView(body.shown, tokenizer(), prompt, echo, ToolReply(HERMES, {"weather"}, True, "a"))
    message = view.whole([], End(State.FINISHED, text, "stop", None, None, None))["message"]
    assert (message["content"], message.get("tool_calls")) == (call, None)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "minProperties": 1},
        {"type": "array"},
        {"properties": []},
        {"required": 3},
        {"required": [3]},
        {"properties": {"a": 3}},
        {"properties": {"a": False}},
    ],
)
def test_what_a_call_in_python_cannot_follow_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError):
        grammars().check(forced_calls(PYTHON, [Function(name="f", parameters=schema)], True, tokenizer()))
