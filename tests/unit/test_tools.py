"""Calls of tools: read from crafted answers of each family at every split, forced by grammars, and shown."""

import json
from typing import Any

import pytest
import tokenizers
import torch

from app.fields.prompt import plain
from app.fields.schema import ChatBody, parse
from app.gateway.errors import ApiError
from app.tools.call_grammar import forced_calls
from app.tools.generic_tools import with_tools
from app.tools.tool import Function
from app.tools.tool_format import (
    ARRAY,
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_NAMED,
    PYTHON,
    ToolFormat,
    tool_format,
)
from app.tools.tool_parser import Piece, ToolParser
from app.tools.tool_reply import ToolReply
from relay.chat_template import ChatTemplate
from relay.grammar import GrammarError, Grammars
from relay.sampling import SamplingParams
from relay.tokenizer import Tokenizer
from tests.grammars import grammars, tokenizer
from workers.engine.messages import Sampled
from workers.engine.sampler import Sampler, SamplingRow

WEATHER = Function(
    name="weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 10}, "days": {"type": "integer"}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
)
STOP = Function(name="stop_now")
NAMES = {"weather", "stop_now"}
TOOLS = [{"type": "function", "function": each.model_dump(exclude_none=True)} for each in (WEATHER, STOP)]
ASK: Any = [{"role": "user", "content": "How is Rome?"}]

Calls = list[tuple[str, str]]


def gathered(pieces: list[Piece]) -> tuple[str, Calls]:
    """The text, and of each call its name, which comes first and once, and its arguments."""
    calls: dict[int, list[str]] = {}
    for piece in pieces:
        if piece.name is not None:
            assert piece.call == len(calls)
            calls[piece.call] = [piece.name, ""]
        elif piece.call >= 0:
            calls[piece.call][1] += piece.arguments
    return "".join(piece.text for piece in pieces), [(name, arguments) for name, arguments in calls.values()]


ROME = '{"city": "Ro}m\\"e", "days": [1, {"a": "]"}]}'
CRAFTED: list[tuple[ToolFormat, str, str, Calls]] = [
    (
        HERMES,
        f'<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>',
        "",
        [("weather", ROME)],
    ),
    (
        HERMES,
        f'Let me look.\n<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {}, "name": "stop_now"}\n</tool_call>\n',
        "Let me look.",
        [("weather", ROME), ("stop_now", "{}")],
    ),
    (
        HERMES,  # a list, as SmolLM2 writes it
        '<tool_call>[{"name": "stop_now", "arguments": {}}, '
        '{"name": "weather", "arguments": {"a":1}}]</tool_call>',
        "",
        [("stop_now", "{}"), ("weather", '{"a":1}')],
    ),
    (HERMES, '<tool_call>{"name": "stop_now"}</tool_call> Done <b>!', " Done <b>!", [("stop_now", "{}")]),
    (HERMES, '<tool_call>{"name": "stop_now", "arguments": "{\\"a\\": 1}"}', "", [("stop_now", '{"a": 1}')]),
    (LLAMA3, f'{{"name": "weather", "parameters": {ROME}}}', "", [("weather", ROME)]),
    (
        LLAMA3,
        f'<|python_tag|>{{"name": "weather", "parameters": {ROME}}}; '
        '{"name": "stop_now", "parameters": {}}',
        "",
        [("weather", ROME), ("stop_now", "{}")],
    ),
    (
        MISTRAL,
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {ROME}}}, '
        '{"name": "stop_now", "arguments": {}}]',
        "",
        [("weather", ROME), ("stop_now", "{}")],
    ),
    (
        HERMES,
        '<tool_call>{ "arguments": {"a": 1}, "name": "stop_now"}</tool_call>',
        "",
        [("stop_now", '{"a": 1}')],
    ),
    (MISTRAL, '[TOOL_CALLS] [{"name": "stop_now", "arguments": {}, "id": "a"}]', "", [("stop_now", "{}")]),
    (MISTRAL, 'Well. [TOOL_CALLS] [{"name": "stop_now", "arguments": {}}]\n', "Well.", [("stop_now", "{}")]),
    (
        MISTRAL_NAMED,
        f"Hm. [TOOL_CALLS]weather[ARGS]{ROME}[TOOL_CALLS]stop_now[CALL_ID]a1b2[ARGS] {{}}",
        "Hm.",
        [("weather", ROME), ("stop_now", "{}")],
    ),
    # what ends a list of calls is no text, what follows is
    (MISTRAL, '[TOOL_CALLS][{"name": "stop_now", "arguments": {}}]\nbye', "\nbye", [("stop_now", "{}")]),
    (
        LLAMA3,
        '{"name": "stop_now", "parameters": {}} ; {"name": "weather", "parameters": {"a": 1}} I {did} it;',
        " I {did} it;",
        [("stop_now", "{}"), ("weather", '{"a": 1}')],
    ),
    (
        LLAMA3,
        '{"name": "stop_now", "parameters": {}}; {"a": 1} was it',
        ' {"a": 1} was it',
        [("stop_now", "{}")],
    ),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "stop_now", "arguments": {}}][TOOL_CALLS][{"name": "stop_now"}]',
        "",
        [("stop_now", "{}"), ("stop_now", "{}")],
    ),
    (HERMES, '<tool_call>{"name": "stop_now"}</tool_c', "", [("stop_now", "{}")]),  # cut off there
    (
        ARRAY,
        f' [{{"name": "weather", "arguments": {ROME}}}, {{"name": "stop_now", "arguments": {{}}}}]\n',
        "",
        [("weather", ROME), ("stop_now", "{}")],
    ),
    (
        PYTHON,
        """[weather(city='Ro),"m\\'e', days=[1, {"a": None, 'b': (true, False)}]), stop_now( )]""",
        "",
        [
            ("weather", '{"city": "Ro),\\"m\'e", "days": [1, {"a": null, "b": [true, false]}]}'),
            ("stop_now", "{}"),
        ],
    ),
    (PYTHON, "\n[stop_now(a=-1.5)] and so on", " and so on", [("stop_now", '{"a": -1.5}')]),
    (PYTHON, "[stop_now(), rm(a=1)]", " rm(a=1)]", [("stop_now", "{}")]),
    (PYTHON, '[stop_now(a="\\/", b="\\x41",)]', "", [("stop_now", '{"a": "/", "b": "A"}')]),
    (PYTHON, "[stop_now()] stop_now()", " stop_now()", [("stop_now", "{}")]),
    # what is no call is text, to the last character
    (HERMES, "<tool_call>\n</tool_call>", "<tool_call>\n</tool_call>", []),
    (MISTRAL_NAMED, "[TOOL_CALLS]weather{}", "[TOOL_CALLS]weather{}", []),
    (MISTRAL_NAMED, "[TOOL_CALLS]rm[ARGS]{}", "[TOOL_CALLS]rm[ARGS]{}", []),
    (HERMES, "  1 < 2 <tool <tool_cal\n\n", "  1 < 2 <tool <tool_cal\n\n", []),
    (HERMES, "<tool_call>oops</tool_call> x", "<tool_call>oops</tool_call> x", []),
    (HERMES, '<tool_call>{"name": "rm", "arguments": {}}', '<tool_call>{"name": "rm", "arguments": {}}', []),
    (HERMES, '<tool_call>\n{"name": "wea', '<tool_call>\n{"name": "wea', []),
    (HERMES, '{"name": "stop_now", "arguments": {}}', '{"name": "stop_now", "arguments": {}}', []),
    (LLAMA3, '{"city": "Rome"} is JSON', '{"city": "Rome"} is JSON', []),
    (LLAMA3, 'So: {"name": "stop_now", "parameters": {}}', 'So: {"name": "stop_now", "parameters": {}}', []),
    (MISTRAL, "[TOOL_CALL] [TOOL_", "[TOOL_CALL] [TOOL_", []),
    (ARRAY, '[{"a": 1}, 2]', '[{"a": 1}, 2]', []),
    (ARRAY, 'So: [{"name": "stop_now"}]', 'So: [{"name": "stop_now"}]', []),
    (PYTHON, "[1, 2] and [stop_now()]", "[1, 2] and [stop_now()]", []),
    (PYTHON, "stop_now()", "stop_now()", []),
    (PYTHON, "[rm(a=1)]", "[rm(a=1)]", []),
    (PYTHON, "[stop_now", "[stop_now", []),
    (PYTHON, "I call [stop_now()]", "I call [stop_now()]", []),
    (MISTRAL, "", "", []),
]


@pytest.mark.parametrize(("form", "answer", "text", "calls"), CRAFTED)
def test_calls_are_found_whatever_the_pieces(form: ToolFormat, answer: str, text: str, calls: Calls) -> None:
    splits = [[answer], list(answer), *([answer[:i], answer[i:]] for i in range(len(answer)))]
    for split in splits:
        parser = ToolParser(form, NAMES)
        pieces = [piece for part in split for piece in parser.push(part)] + parser.flush()
        assert gathered(pieces) == (text, calls)
        assert (parser.calls, parser.broken) == (len(calls), False)


def test_arguments_come_in_pieces_behind_the_name() -> None:
    parser = ToolParser(HERMES, NAMES)
    parser.push('<tool_call>{"name": "weather", "arguments": {"ci')
    assert parser.push('ty": "Ro') == [Piece(call=0, arguments=char) for char in 'ty": "Ro']


@pytest.mark.parametrize(
    "rest",
    ['{"city": NaN}}</tool_call>', '{"city": oops}}</tool_call>', '{"city": "Ro', '{"city": "Rome"} x}'],
)
def test_a_broken_call_is_content_of_a_whole_answer(rest: str) -> None:
    answer = f'<tool_call>{{"name": "weather", "arguments": {rest}'
    reply = ToolReply(HERMES, NAMES, True, "a")
    assert reply.message(answer) == {"content": answer}
    assert not reply.called
    parser = ToolParser(HERMES, NAMES)
    _, calls = gathered(parser.push(answer) + parser.flush())
    assert parser.broken
    assert [name for name, _ in calls] == ["weather"]


@pytest.mark.parametrize(
    "arguments",
    [
        "1",
        "city=Rome",
        "city=1, city=2",
        "city=f'{1}'",
        "city={1}",
        "city=1e999",
        "city=(",
        "city=]",
        "**{}",
        ",",
        "city=1,,",
        "city=" + "[" * 40,
        "city=open('x').read()",
        "city='Rome",
    ],
)
def test_a_broken_call_in_python_is_content_of_a_whole_answer(arguments: str) -> None:
    answer = f"[weather({arguments})]"
    assert ToolReply(PYTHON, NAMES, True, "a").message(answer) == {"content": answer}
    parser = ToolParser(PYTHON, NAMES)
    _, calls = gathered(parser.push(answer) + parser.flush())
    assert parser.broken
    assert [name for name, _ in calls] == ["weather"]


def test_a_whole_answer_and_its_stream_show_the_same() -> None:
    _, answer, text, calls = CRAFTED[1]
    whole = ToolReply(HERMES, NAMES, True, "a").message(answer)
    assert whole["content"] == text
    shown = [(call["function"]["name"], call["function"]["arguments"]) for call in whole["tool_calls"]]
    assert shown == calls
    reply = ToolReply(HERMES, NAMES, True, "a")
    deltas = [reply.delta(char) for char in answer] + [reply.last_delta("")]
    assert reply.called
    assert "".join(delta.get("content", "") for delta in deltas) == text
    streamed: dict[int, dict[str, Any]] = {}
    for entry in (entry for delta in deltas for entry in delta.get("tool_calls", ())):
        if "id" in entry:
            streamed[entry["index"]] = {
                "id": entry["id"],
                "type": entry["type"],
                "function": entry["function"],
            }
        else:
            streamed[entry["index"]]["function"]["arguments"] += entry["function"]["arguments"]
    assert list(streamed.values()) == whole["tool_calls"]
    assert len({call["id"] for call in whole["tool_calls"]}) == 2
    other = ToolReply(HERMES, NAMES, True, "b").message(answer)["tool_calls"]
    assert other[0]["id"] != whole["tool_calls"][0]["id"]


def test_one_call_where_several_are_not_wanted() -> None:
    _, answer, _, calls = CRAFTED[1]
    whole = ToolReply(HERMES, NAMES, False, "a").message(answer)
    assert [call["function"]["name"] for call in whole["tool_calls"]] == [calls[0][0]]
    parser = ToolParser(HERMES, NAMES, several=False)
    assert gathered(parser.push(answer) + parser.flush())[1] == calls[:1]


# ---- templates

TEMPLATES = {
    "{% for t in tools %}{{ t | tojson }}{% endfor %}<tool_call>": HERMES,
    "{% if tools %}{{ tools }}{% endif %}<|python_tag|>": LLAMA3,
    '<|start_header_id|>{% if tools %}Answer {"name": ..., "parameters": ...}{% endif %}': LLAMA3,
    '{% for t in tools %}{"name": "{{ t }}", "parameters": {}}{% endfor %}Write <function_call> {...}': None,
    "<|start_header_id|>{{ tools }} Answer [name(key=value)]": PYTHON,
    '<|im_start|>{{ tools }} Answer [{"name": "a_tool", "arguments": {"a": "b"}}, ...]': ARRAY,
    "{{ tools }}[AVAILABLE_TOOLS][TOOL_CALLS]": MISTRAL,
    "{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]": MISTRAL_NAMED,
    "{{ messages }} without any": HERMES,
    "{{ tools }} in a way of its own": None,
    "{{ tools }}<tool_call><function=": None,
}


@pytest.mark.parametrize("form", [HERMES, LLAMA3, MISTRAL], ids=lambda form: form.name)
def test_fillers_without_an_end_behind_a_call_cost_no_more_each(form: ToolFormat) -> None:
    """A model that falls into writing newlines must not keep the gateway busy: read anew for each of them,
    these would take half an hour."""
    parser = ToolParser(form, NAMES)
    call = f'{form.start}{{"name": "stop_now", "{form.arguments_key}": {{}}}}'
    told = parser.push(call + "\n" * 100_000) + parser.flush()
    assert gathered(told) == ("", [("stop_now", "{}")])


@pytest.mark.parametrize(("source", "form"), TEMPLATES.items())
def test_a_template_tells_how_calls_are_written(source: str, form: ToolFormat | None) -> None:
    assert tool_format(ChatTemplate(source, {})) == form


def test_a_template_without_tools_gets_plain_messages() -> None:
    call = {"id": "c", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    said: Any = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
        {"role": "tool", "tool_call_id": "d", "content": "dry"},
    ]
    del said[1]["content"]  # null is absent
    messages = [plain(message) for message in parse(ChatBody, {"messages": said}).messages]
    shown = with_tools(messages, TOOLS)
    assert [message["role"] for message in shown] == ["system", "user", "assistant", "user"]
    assert json.dumps(TOOLS[0]["function"]) in shown[0]["content"]
    assert gathered(ToolParser(HERMES, NAMES).push(shown[2]["content"]))[1] == [
        ("weather", '{"city": "Rome"}')
    ]
    responses = "<tool_response>\nsunny\n</tool_response>\n<tool_response>\ndry\n</tool_response>"
    assert shown[3]["content"] == responses
    assert [set(message) for message in shown] == [{"role", "content"}] * 4
    system = {"role": "system", "content": "Be brief."}
    told = with_tools([system, *messages], TOOLS)
    assert told[0]["content"].startswith("Be brief.\n\n")
    assert with_tools(messages[:1], []) == messages[:1]


def test_a_template_gets_the_arguments_of_earlier_calls_as_an_object() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    (message,) = parse(ChatBody, {"messages": [{"role": "assistant", "tool_calls": [call]}]}).messages
    assert plain(message)["tool_calls"] == [call | {"function": {"name": "f", "arguments": {"a": 1}}}]


# ---- forced calls


def forced_answer(grammar: str, seed: int) -> str:
    """What random logits say under the grammar."""
    sampler = Sampler(tokenizer().vocab_size, tokenizer().eos_ids, grammars=grammars())
    params, output = SamplingParams(2000, seed=seed, grammar=grammar), []
    state = sampler.new_state(params, (), output)
    for position in range(2000):
        generator = torch.Generator().manual_seed(seed * 10_000 + position)
        logits = torch.randn(1, tokenizer().vocab_size, generator=generator)
        (sampled,) = sampler.sample(logits, [SamplingRow(params, (), output, position, state)])
        assert isinstance(sampled, Sampled)
        if sampled.token_id in tokenizer().eos_ids:
            return tokenizer().decode(output)
        output.append(sampled.token_id)
        state.append(sampled.token_id)
    raise AssertionError("no end")


@pytest.mark.parametrize("form", [HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED, ARRAY, PYTHON])
@pytest.mark.parametrize("several", [True, False])
def test_a_forced_answer_is_calls_that_follow_the_schema(form: ToolFormat, several: bool) -> None:
    grammar = forced_calls(form, [WEATHER], several, tokenizer())
    for seed in range(2):
        parser = ToolParser(form, NAMES)
        text, calls = gathered(parser.push(forced_answer(grammar, seed)) + parser.flush())
        assert (text, parser.broken) == ("", False)
        assert len(calls) >= 1
        assert several or len(calls) == 1
        for name, arguments in calls:
            assert name == "weather"
            assert set(json.loads(arguments)) == {"city", "days"}


@pytest.mark.parametrize("required", [[], ["a"], ["c", "b"]])
def test_a_forced_call_in_python_has_what_it_must_and_may_have(required: list[str]) -> None:
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {"type": "object", "properties": dict.fromkeys("abc", digit), "required": required}
    grammar = forced_calls(PYTHON, [Function(name="stop_now", parameters=schema)], False, tokenizer())
    seen = set()
    for seed in range(12):
        parser = ToolParser(PYTHON, NAMES)
        text, ((name, arguments),) = gathered(parser.push(forced_answer(grammar, seed)) + parser.flush())
        assert (text, name, parser.broken) == ("", "stop_now", False)
        given = json.loads(arguments)
        assert set(required) <= given.keys() <= set("abc")
        seen.add(tuple(given))
    assert len(seen) > 1


def test_a_name_that_python_has_not_cannot_be_demanded() -> None:
    schema = {"type": "object", "properties": {"a-b": {}}, "required": ["a-b"]}
    with pytest.raises(GrammarError, match="'a-b'"):
        forced_calls(PYTHON, [Function(name="f", parameters=schema)], False, tokenizer())


def test_a_special_start_mark_is_a_token_of_the_grammar() -> None:
    marked = HERMES._replace(start="<|im_start|>", opening="<|im_start|>\n")
    assert f"<[{tokenizer().token_id('<|im_start|>')}]>" in forced_calls(marked, [STOP], False, tokenizer())
    grammars().check(forced_calls(marked, [STOP], False, tokenizer()))


# ---- fields


def chat(**fields: Any) -> ChatBody:
    return parse(ChatBody, {"messages": ASK, **fields})


def grammar(**fields: Any) -> str | None:
    return chat(**fields).params(10, 1, tokenizer(), grammars()).grammar


def test_choices_of_tools() -> None:
    both, one = [WEATHER, STOP], [STOP]
    assert grammar(tools=TOOLS) is None
    assert grammar(tools=TOOLS, tool_choice="none") is None
    assert chat(tools=TOOLS, tool_choice="none").callable_tools == []
    assert grammar(tools=TOOLS, tool_choice="required") == forced_calls(HERMES, both, True, tokenizer())
    single = grammar(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert single == forced_calls(HERMES, both, False, tokenizer())
    named = {"type": "function", "function": {"name": "stop_now"}}
    assert grammar(tools=TOOLS, tool_choice=named) == forced_calls(HERMES, one, False, tokenizer())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "regex": "a"}, "regex"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nope"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        ({"tools": TOOLS, "chat_template": "{{ tools }}"}, "tools"),
        ({"tools": TOOLS, "chat_template": "{% if %}"}, "chat_template"),
        ({"messages": [{"role": "user", "tool_calls": []}]}, "messages.0.content"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages.0"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "["}}],
                    }
                ]
            },
            "messages.0.tool_calls.0.function.arguments",
        ),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        grammar(**fields)
    assert caught.value.status == 400
    assert (caught.value.param or "").startswith(param)


def test_a_special_start_mark_stays_in_the_text() -> None:
    """What begins a call must be seen, or none would be found."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"</s>": 0, "[TOOL_CALLS]": 1}, merges=[]))
    backend.add_special_tokens(["</s>", "[TOOL_CALLS]"])
    source = "{{ tools }}[TOOL_CALLS]"
    mistral = Tokenizer(backend, special_tokens={}, eos_ids={0}, chat_template=source)

    def skips(**fields: Any) -> bool:
        return chat(**fields).params(10, 1, mistral, Grammars(mistral, 2)).skip_special_tokens

    assert not skips(tools=TOOLS)
    assert skips()
    assert skips(tools=TOOLS, tool_choice="none")
    assert not skips(skip_special_tokens=False)
