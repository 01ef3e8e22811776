"""What fields of the API do with the real model over the whole relay, asked for by the `openai` client."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import torch
from pydantic import BaseModel, Field

from relay.model_file import default_model_path
from relay.request import State
from relay.tokenizer import Tokenizer
from tests.gateway_rig import GatewayProcess
from tests.models import default_model_in_transformers
from tests.processes import until
from tests.relay_rig import Relay
from tests.servers import RedisServer

MODEL = "served"
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


def test_words_and_tokens_that_may_not_be_or_must(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    def said(**fields: Any) -> str:
        asked: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 6, "temperature": 0}
        return client.completions.create(model=MODEL, **asked, extra_body=fields).choices[0].text

    assert "Paris" in said()
    assert "Paris" not in said(bad_words=["Paris"])
    digits = [tokenizer.encode(digit, add_special_tokens=False)[0] for digit in "0123456789"]
    assert re.fullmatch(r"\d{6}", said(allowed_token_ids=digits))


def test_computed_prefixes_are_shared_under_one_salt_only(client: openai.OpenAI) -> None:
    def cached(salt: str | None) -> int:
        prompt = "Some words that nobody else sends in these tests, again and again. " * 4
        fields = {} if salt is None else {"cache_salt": salt}
        reply = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, extra_body=fields)
        assert reply.usage
        assert reply.usage.prompt_tokens_details
        return reply.usage.prompt_tokens_details.cached_tokens or 0

    found = [cached(salt) > 0 for salt in ("x", "y", None, "x", None)]
    assert found == [False, False, False, True, True]


# ---- tools

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
TOOLS: Any = [WEATHER, CLOCK]
ROME: Any = [{"role": "user", "content": "How is the weather in Rome for two days?"}]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_is_demanded_is_made(client: openai.OpenAI, choice: Any) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": ROME,
        "tools": [WEATHER],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 120,
        "temperature": 0,
    }
    (whole,) = client.chat.completions.create(**asked).choices
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    (call,) = whole.message.tool_calls or ()
    assert (call.type, call.function.name) == ("function", "weather")
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])
    name, arguments, ids, reasons = "", "", set(), []
    for chunk in client.chat.completions.create(**asked, stream=True):
        reasons.append(chunk.choices[0].finish_reason)
        assert not chunk.choices[0].delta.content
        for delta in chunk.choices[0].delta.tool_calls or ():
            assert (delta.index, bool(delta.function)) == (0, True)
            ids |= {delta.id} - {None}
            name += (delta.function and delta.function.name) or ""
            arguments += (delta.function and delta.function.arguments) or ""
    assert (name, arguments, len(ids)) == ("weather", call.function.arguments, 1)
    assert reasons[-1] == "tool_calls"


def test_a_result_goes_back_to_the_model(client: openai.OpenAI) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
    }
    said: Any = [
        *ROME,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny, 31 degrees"},
    ]
    reply = client.chat.completions.create(
        model=MODEL, messages=said, tools=TOOLS, tool_choice="none", max_tokens=16, temperature=0
    )
    assert reply.choices[0].message.content
    assert reply.choices[0].message.tool_calls is None


def test_tools_that_may_be_called_or_not(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=ROME, tools=TOOLS, max_tokens=40, temperature=0
    )
    (choice,) = reply.choices
    assert bool(choice.message.tool_calls) == (choice.finish_reason == "tool_calls")
    assert choice.message.tool_calls or choice.message.content


def called_before(city: str) -> list[Any]:
    """A turn in which the weather was called with days that its schema does not allow."""
    arguments = json.dumps({"city": city, "days": "two"})
    call = {"id": city, "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": f"How is the weather in {city} for two days?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": city, "content": "sunny"},
        {"role": "assistant", "content": f"It is sunny in {city}."},
    ]


# What came before teaches the model to call, and to call wrongly.
TAUGHT: Any = [*called_before("Paris"), *called_before("Oslo"), *called_before("Madrid"), *ROME]


def calling(strict: bool, **more: Any) -> dict[str, Any]:
    weather = {"type": "function", "function": WEATHER["function"] | {"strict": strict}}
    return {"model": MODEL, "messages": TAUGHT, "tools": [weather], "max_tokens": 80, "temperature": 0} | more


def follows_schema(arguments: str) -> bool:
    return jsonschema.Draft202012Validator(WEATHER["function"]["parameters"]).is_valid(json.loads(arguments))


def test_a_strict_function_is_called_by_its_schema(client: openai.OpenAI) -> None:
    def said(strict: bool, **more: Any) -> list[str]:
        choices = client.chat.completions.create(**calling(strict, **more)).choices
        assert {choice.finish_reason for choice in choices} == {"tool_calls"}
        return [call.function.arguments for choice in choices for call in choice.message.tool_calls or ()]

    assert not any(map(follows_schema, said(False))), "by itself the model calls as it did before"
    assert all(map(follows_schema, said(True)))
    assert all(map(follows_schema, said(True, parallel_tool_calls=False)))
    several = said(True, n=3, temperature=0.2, seed=1)
    assert len(several) >= 3
    assert all(map(follows_schema, several))


def test_a_strict_call_outlives_its_worker(client: openai.OpenAI, relay: Relay) -> None:
    asked = calling(True, parallel_tool_calls=False)
    (choice,) = client.chat.completions.create(**asked).choices
    (call,) = choice.message.tool_calls or ()
    pieces = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            pieces.append((delta.function and delta.function.arguments) or "")
        if len(pieces) == 4:  # its name, and some of its arguments
            pieces.append("")
            (doomed,) = (worker for worker in relay.workers if worker.role == "decode")
            relay.workers.remove(doomed)
            doomed.send(signal.SIGKILL)
            relay.start("decode")
    assert "".join(pieces) == call.function.arguments
    assert follows_schema(call.function.arguments)
    assert relay.rooms.list_requests(1)[0].attempts > 1


def test_a_function_of_a_response_is_strict_unless_it_says_no(client: openai.OpenAI) -> None:
    said = [
        {"type": "function_call", "call_id": item["tool_calls"][0]["id"], **item["tool_calls"][0]["function"]}
        if item.get("tool_calls")
        else {"type": "function_call_output", "call_id": item["tool_call_id"], "output": item["content"]}
        if item["role"] == "tool"
        else item
        for item in TAUGHT
    ]

    def follows(**more: Any) -> bool:
        tool = {"type": "function", **WEATHER["function"], **more}
        asked: Any = {"model": MODEL, "input": said, "tools": [tool], "parallel_tool_calls": False}
        reply = client.responses.create(**asked, max_output_tokens=80, temperature=0)
        (item,) = reply.output
        assert item.type == "function_call"
        return follows_schema(item.arguments)

    assert follows()
    assert not follows(strict=False)


# ---- the likelihood of a given text


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(default_model_path())


STORY = "Once upon a time there was a small village by the river, é and ü included, where" + 40 * " they sang"


def expected(ids: list[int]) -> torch.Tensor:
    """Log probabilities [n - 1, vocab] by transformers in float32: row i is about token i + 1."""
    with torch.inference_mode():
        return default_model_in_transformers()(torch.tensor([ids])).logits[0, :-1].log_softmax(dim=-1)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_the_likelihood_of_a_text_is_that_of_transformers(
    client: openai.OpenAI, tokenizer: Tokenizer, max_tokens: int
) -> None:
    ids = tokenizer.encode(STORY)
    for _ in range(2):  # what is cached by then has no logits
        reply = client.completions.create(
            model=MODEL, prompt=[ids], echo=True, logprobs=2, max_tokens=max_tokens, temperature=0
        )
        (choice,) = reply.choices
        shown: Any = choice.logprobs
        assert choice.finish_reason == "length"
        assert reply.usage
        assert reply.usage.completion_tokens == max_tokens
        assert len(shown.tokens) == len(ids) + max_tokens
        assert choice.text.startswith(STORY)
        assert (shown.token_logprobs[0], shown.top_logprobs[0]) == (None, None)
        wanted = expected(ids)
        own = wanted[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
        found = torch.tensor(shown.token_logprobs[1 : len(ids)])
        torch.testing.assert_close(found, own, atol=1e-3, rtol=0)
        assert float(found.sum() - own.sum()) == pytest.approx(0, abs=1e-3)
        for position in range(1, len(ids)):
            token, top = shown.tokens[position], shown.top_logprobs[position]
            best = tokenizer.token_text(int(wanted[position - 1].argmax()))
            assert max(top, key=top.get) == best
            assert token in top
            at = shown.text_offset[position]
            assert "\N{REPLACEMENT CHARACTER}" in token or choice.text[at : at + len(token)] == token


def test_the_likelihoods_of_several_texts(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    prompts = [tokenizer.encode(text) for text in ("Rome is in Italy.", "Cats sleep a lot", "a")]
    reply = client.completions.create(
        model=MODEL, prompt=prompts, n=2, echo=True, logprobs=1, max_tokens=0, temperature=0
    )
    assert [choice.index for choice in reply.choices] == list(range(6))
    for number, choice in enumerate(reply.choices):
        ids, shown = prompts[number // 2], choice.logprobs
        assert shown
        assert (shown.token_logprobs or [0.0])[0] is None
        wanted = expected(ids)[torch.arange(len(ids) - 1), torch.tensor(ids[1:], dtype=torch.int64)]
        assert (shown.token_logprobs or [])[1:] == pytest.approx(wanted.tolist(), abs=1e-3)


def test_prompt_logprobs_in_the_form_of_vllm(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The capital of France is Paris")
    reply: Any = client.completions.create(
        model=MODEL, prompt=ids, max_tokens=1, extra_body={"prompt_logprobs": 1, "return_token_ids": True}
    )
    (choice,) = reply.choices
    assert choice.prompt_token_ids == ids
    assert len(choice.token_ids) == 1
    assert (choice.prompt_logprobs[0], len(choice.prompt_logprobs)) == (None, len(ids))
    wanted = expected(ids)
    for row, token_id, entry in zip(wanted, ids[1:], choice.prompt_logprobs[1:], strict=True):
        own = entry[str(token_id)]
        assert own["logprob"] == pytest.approx(float(row[token_id]), abs=1e-3)
        assert own["rank"] == 1 + int((row > row[token_id]).sum())
        assert own["decoded_token"] == tokenizer.token_text(token_id)
        assert entry[str(int(row.argmax()))]["rank"] == 1


def test_an_echo_is_streamed_with_its_log_probabilities(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "The sky is", "echo": True, "max_tokens": 4}
    whole: Any = client.completions.create(**asked, logprobs=1, temperature=0).choices[0]
    chunks: Any = list(client.completions.create(**asked, logprobs=1, temperature=0, stream=True))
    choices = [chunk.choices[0] for chunk in chunks]
    assert "".join(choice.text for choice in choices) == whole.text
    assert whole.text.startswith("The sky is")
    for name in ("tokens", "token_logprobs", "text_offset"):
        parts = [getattr(choice.logprobs, name) for choice in choices if choice.logprobs]
        assert [each for part in parts for each in part] == getattr(whole.logprobs, name)
    plain = [
        chunk.choices[0].text for chunk in client.completions.create(**asked, temperature=0, stream=True)
    ]
    assert (plain[0], "".join(plain)) == ("The sky is", whole.text)


def test_prompt_logprobs_of_a_chat_and_of_a_poll(client: openai.OpenAI, gateway: GatewayProcess) -> None:
    more = {"prompt_logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
    reply: Any = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=2, logprobs=True, extra_body=more
    )
    assert len(reply.prompt_logprobs) == len(reply.prompt_token_ids)
    ids = reply.choices[0].token_ids
    assert [entry.token for entry in reply.choices[0].logprobs.content] == [f"token_id:{i}" for i in ids]
    sent = {"prompt": reply.prompt_token_ids, "max_tokens": 1, "prompt_logprobs": 0}
    accepted = gateway.call("POST", "/v1/requests", sent).body
    polled = gateway.call("GET", f"{accepted['links']['self']}?wait=30").body
    values = [entry[0][1] for entry in polled["prompt_logprobs"][1:]]
    shown = [
        entry[str(token_id)]["logprob"]
        for token_id, entry in zip(reply.prompt_token_ids[1:], reply.prompt_logprobs[1:], strict=True)
    ]
    assert values == pytest.approx(shown, abs=1e-4)


def test_what_is_said_is_in_no_log_of_a_worker(relay: Relay, client: openai.OpenAI) -> None:
    client.completions.create(model=MODEL, prompt="kumquat", max_tokens=4, echo=True)
    for worker in relay.workers:
        written = worker.log.read_text()
        assert "claimed" in written, "the level is info"
        assert "kumquat" not in written


def test_log_probabilities_outlive_their_prefill_worker(
    relay: Relay, gateway: GatewayProcess, tokenizer: Tokenizer
) -> None:
    ids = (tokenizer.encode(STORY) * 20)[:600]

    def told(doomed: bool) -> list[float]:
        sent = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        accepted = gateway.call("POST", "/v1/requests", sent).body
        if doomed:
            relay.reaches(
                accepted["id"], lambda record: record.state is State.PREFILL, "it is being computed"
            )
            (worker,) = (worker for worker in relay.workers if worker.role == "prefill")
            relay.workers.remove(worker)
            worker.end()
            assert relay.rooms.scores(accepted["id"]) is None
            relay.start("prefill")
        until(lambda: relay.record(accepted["id"]).state.terminal, "it ends", deadline_s=120)
        answer = gateway.call("GET", accepted["links"]["self"]).body
        assert (answer["status"], answer["ledger"]["attempts"] > 1) == ("finished", doomed)
        return [entry[0][1] for entry in answer["prompt_logprobs"][1:]]

    assert told(True) == pytest.approx(told(False), abs=1e-4)
