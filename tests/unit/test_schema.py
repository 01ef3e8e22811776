"""Bodies: what is accepted, what their defaults mean, and that equal bodies have equal digests."""

from typing import Any

import pytest

from app.api.generate import GenerateBody
from app.fields.prompt import plain
from app.fields.schema import ChatBody, CompletionBody, NativeBody, parse
from app.gateway.body import read_body
from app.gateway.errors import ApiError
from relay.grammar import Grammars
from relay.model_file import default_model_path
from relay.sampling import SamplingParams
from relay.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(default_model_path())
GRAMMARS = Grammars(TOKENIZER, TOKENIZER.vocab_size)
ASK = [{"role": "user", "content": "hi"}]


def params(**fields: Any) -> SamplingParams:
    return parse(NativeBody, {"prompt": "x", **fields}).params(100, 7, TOKENIZER, GRAMMARS)


def test_defaults_are_those_of_the_field() -> None:
    assert params() == SamplingParams(max_tokens=100, seed=7)


def test_greedy_switches_the_filters_off() -> None:
    greedy = params(temperature=1e-6, top_p=0.5, top_k=3, min_p=0.2)
    assert (greedy.temperature, greedy.top_p, greedy.top_k, greedy.min_p) == (0.0, 1.0, 0, 0.0)


def test_every_parameter_reaches_the_sampler() -> None:
    fields: dict[str, Any] = {
        "min_tokens": 2,
        "temperature": 2,
        "top_k": 5,
        "top_p": 0.5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "logit_bias": {"3": -100, "999": 1},
        "stop": ["a", "b", "c", "d"],
        "stop_token_ids": [0, 999],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "logprobs": 20,
        "seed": 11,
    }
    expected = fields | {
        "max_tokens": 100,
        "logit_bias": {3: -100.0, 999: 1.0},
        "stop": ("a", "b", "c", "d"),
        "stop_token_ids": (0, 999),
    }
    assert params(**fields) == SamplingParams(**expected)


@pytest.mark.parametrize(("seed", "used"), [(-1, (1 << 63) - 1), ((1 << 63) - 1, (1 << 63) - 1), (0, 0)])
def test_any_64_bit_seed_fits_63_bits(seed: int, used: int) -> None:
    assert params(seed=seed).seed == used


def test_limits_on_output() -> None:
    assert parse(NativeBody, {"prompt": "x"}).output_tokens is None
    assert parse(CompletionBody, {"prompt": "x"}).output_tokens == 16
    assert parse(CompletionBody, {"prompt": "x", "max_completion_tokens": 3}).output_tokens == 3
    assert parse(CompletionBody, {"prompt": "x", "max_tokens": 0, "echo": True}).output_tokens == 0
    assert parse(NativeBody, {"prompt": "x", "max_completion_tokens": 3}).output_tokens == 3
    assert parse(ChatBody, {"messages": ASK}).output_tokens is None
    assert parse(ChatBody, {"messages": ASK, "max_tokens": 3}).output_tokens == 3
    both = {"messages": ASK, "max_tokens": 3, "max_completion_tokens": 4}
    assert parse(ChatBody, both).output_tokens == 4


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 4}, 4),
    ],
)
def test_logprobs_of_a_chat(fields: dict[str, Any], wanted: int | None) -> None:
    assert parse(ChatBody, {"messages": ASK, **fields}).top_logprobs_wanted == wanted


@pytest.mark.parametrize(
    ("given", "prompt"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])],
)
def test_the_four_forms_of_a_prompt(given: Any, prompt: list[Any]) -> None:
    assert parse(CompletionBody, {"prompt": given}).prompts == prompt


@pytest.mark.parametrize(
    ("fields", "n", "samples", "logprobs"),
    [
        ({}, 1, 1, None),
        ({"n": 3}, 3, 3, None),
        ({"best_of": 3}, 1, 3, 0),
        ({"n": 2, "best_of": 3, "logprobs": 2}, 2, 3, 2),
        ({"n": 2, "best_of": 2}, 2, 2, None),
    ],
)
def test_samples_and_what_choosing_among_them_needs(
    fields: dict[str, Any], n: int, samples: int, logprobs: int | None
) -> None:
    body = parse(CompletionBody, {"prompt": "x", **fields})
    assert (body.n, body.samples, body.logprobs_needed) == (n, samples, logprobs)
    assert body.shown.logprobs == fields.get("logprobs")


def test_parts_of_a_message_are_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (message,) = parse(ChatBody, {"messages": [{"role": "user", "content": parts}]}).messages
    assert message.text == "ab"


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "best_of": 1, "echo": False, "suffix": ""},
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "auto"},
        {"never_heard_of": {"x": [1]}, "user": "me", "stop": []},
    ],
)
def test_what_changes_nothing_is_accepted(fields: dict[str, Any]) -> None:
    parse(CompletionBody, {"prompt": "x", **fields})


TOOL = {"type": "function", "function": {"name": "f"}}
OF_A_CHAT: dict[str, Any] = {
    "messages": ASK,
    "top_logprobs": 1,
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "chat_template": "x",
    "chat_template_kwargs": {"a": 1},
    "documents": [{}],
    "reasoning_effort": "low",
    "add_generation_prompt": False,
    "continue_final_message": True,
}
OF_A_STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("kind", "given", "misplaced"),
    [
        (CompletionBody, {"prompt": "x"}, OF_A_CHAT),
        (NativeBody, {"prompt": "x"}, OF_A_STREAM | {"echo": True, "top_logprobs": 1}),
        (ChatBody, {"messages": ASK}, {"prompt": "x"}),
        (
            GenerateBody,
            {"text": "x"},
            OF_A_CHAT | {"max_tokens": 1, "temperature": 0, "stop": "x", "stream_options": {}},
        ),
    ],
)
def test_a_field_of_another_call_is_refused_by_name(
    kind: type[Any], given: dict[str, Any], misplaced: dict[str, Any]
) -> None:
    for name, value in misplaced.items():
        with pytest.raises(ApiError) as caught:
            parse(kind, given | {name: value})
        assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
        assert name in caught.value.message


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("verbosity", "low"),
        ("moderation", {"model": "x"}),
        ("thinking_token_budget", 5),
        ("include_reasoning", False),
        ("truncation_side", "right"),
        ("logprob_token_ids", [1]),
        ("return_token_offsets", True),
        ("detokenize", False),
        ("structural_tag", "{}"),
        ("length_penalty", True),
    ],
)
def test_what_is_not_supported_is_refused_by_name(kind: type[Any], name: str, value: Any) -> None:
    given = {"prompt": "x"} if kind is CompletionBody else {"messages": ASK}
    with pytest.raises(ApiError) as caught:
        parse(kind, given | {name: value})
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


def test_streams_are_not_padded() -> None:
    asked = {"prompt": "x", "stream": True, "stream_options": {"include_obfuscation": True}}
    with pytest.raises(ApiError) as caught:
        parse(CompletionBody, asked)
    assert caught.value.param == "stream_options.include_obfuscation"
    options = {"include_obfuscation": False, "include_usage": True}
    assert parse(CompletionBody, {"prompt": "x", "stream": True, "stream_options": options}).stream


@pytest.mark.parametrize(
    "said",
    [
        {"refusal": "no"},
        {"content": [{"type": "refusal", "refusal": "no"}]},
        {"content": [{"type": "text", "text": "n"}, {"type": "refusal", "refusal": "o"}]},
    ],
)
def test_a_refusal_is_what_an_assistant_said(said: dict[str, Any]) -> None:
    (_, message) = parse(ChatBody, {"messages": [*ASK, {"role": "assistant", **said}]}).messages
    assert message.text == "no"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "yes", "refusal": "no"},
        {"role": "user", "refusal": "no"},
        {"role": "assistant", "content": "x", "audio": {"id": "a"}},
    ],
)
def test_what_a_message_cannot_say_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        parse(ChatBody, {"messages": [message]})
    assert caught.value.param == "messages.0"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_a_template_is_given_earlier_reasoning(name: str) -> None:
    said = {"role": "assistant", "content": "4", name: "2 + 2"}
    (message,) = parse(ChatBody, {"messages": [said]}).messages
    assert plain(message)["reasoning_content"] == "2 + 2"


def test_null_means_absent_at_every_depth() -> None:
    with_nulls = b'{"prompt": "x", "stop": null, "stream_options": {"include_usage": null}}'
    without = b'{ "stream_options": {}, "prompt": "x"}'
    assert read_body(with_nulls, "application/json") == read_body(without, None)


def test_another_value_is_another_digest() -> None:
    digests = {read_body(raw, None).digest for raw in (b'{"a":1}', b'{"a":1.5}', b'{"a":"1"}', b'{"b":1}')}
    assert len(digests) == 4


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-8", "application/x-www-form-urlencoded"]
)
def test_content_types_that_clients_send(content_type: str) -> None:
    assert read_body(b"{}", content_type).fields == {}


def test_an_error_names_the_field_and_what_is_allowed() -> None:
    with pytest.raises(ApiError) as caught:
        parse(NativeBody, {"prompt": "x", "temperature": 3})
    assert caught.value.param == "temperature"
    assert caught.value.message == "temperature: Input should be less than or equal to 2."
