"""/v1/responses, as the unmodified `openai` client and raw HTTP meet it."""

import json
import secrets
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from relay.request import Finish, State, Token
from relay.rooms import Rooms
from relay.tokenizer import Tokenizer
from tests.gateway_rig import (
    Answering,
    GatewayProcess,
    ScriptedWorker,
    eventually,
    words,
)
from tests.servers import RedisServer

MODEL = f"responses-{secrets.token_hex(4)}"
TEXT = " Paris is the capital."
HELD = " It"


def prompt(answering: Answering, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(list(answering.claimed[-1].prompt_ids))


def test_an_answer(
    client: openai.OpenAI, answering: Answering, spoken: list[Token], tokenizer: Tokenizer
) -> None:
    response = client.responses.create(
        model=MODEL,
        input="The capital of France?",
        instructions="Be brief.",
        metadata={"job": "7"},
        temperature=0.5,
        max_output_tokens=40,
    )
    assert response.id.startswith("resp_")
    assert (response.status, response.output_text) == ("completed", TEXT + HELD)
    (item,) = response.output
    assert item.type == "message"
    assert item.status == "completed"
    assert response.usage
    assert response.usage.output_tokens == len(spoken)
    assert response.usage.input_tokens == len(answering.claimed[0].prompt_ids)
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert response.completed_at
    assert (response.instructions, response.temperature, response.metadata) == (
        "Be brief.",
        0.5,
        {"job": "7"},
    )
    params = answering.claimed[0].params
    assert (params.max_tokens, params.temperature) == (40, 0.5)
    assert client.responses.retrieve(response.id) == response
    assert "Be brief." in prompt(answering, tokenizer)


def test_a_conversation_goes_on(client: openai.OpenAI, answering: Answering, tokenizer: Tokenizer) -> None:
    first = client.responses.create(model=MODEL, input="One?", instructions="Be brief.")
    second = client.responses.create(model=MODEL, input="Two?", previous_response_id=first.id)
    client.responses.delete(first.id)
    third = client.responses.create(
        model=MODEL, input=[{"role": "user", "content": "Three?"}], previous_response_id=second.id
    )
    assert third.previous_response_id == second.id
    said = prompt(answering, tokenizer)
    places = [said.index(text) for text in ("One?", "Two?", "Three?")]
    assert places == sorted(places)
    assert said.count(TEXT + HELD) == 2
    assert "Be brief." not in said, "instructions are those of one response"
    items = list(client.responses.input_items.list(third.id, order="asc", limit=2))
    assert [item.role for item in items] == ["user", "assistant"] * 2 + ["user"]  # type: ignore[union-attr]
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input="Four?", previous_response_id=first.id)


def test_a_stream(client: openai.OpenAI, answering: Answering, spoken: list[Token]) -> None:
    events = list(client.responses.create(model=MODEL, input="France?", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    deltas = len(spoken) + 1
    assert names == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == TEXT + HELD
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response == client.responses.retrieve(last.response.id)
    assert last.response.output_text == text


def test_the_stream_helper_of_the_client(client: openai.OpenAI, answering: Answering) -> None:
    with client.responses.stream(model=MODEL, input="France?") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == TEXT + HELD


def test_an_answer_that_is_cut_off_is_incomplete(
    client: openai.OpenAI, worker: ScriptedWorker, spoken: list[Token]
) -> None:
    with Answering(worker, spoken[:2], Finish("length")).running():
        response = client.responses.create(model=MODEL, input="France?", max_output_tokens=2)
        events = list(client.responses.create(model=MODEL, input="France?", stream=True))
    assert response.status == "incomplete"
    assert response.incomplete_details
    assert response.incomplete_details.reason == "max_output_tokens"
    assert events[-1].type == "response.incomplete"


def test_logprobs(client: openai.OpenAI, answering: Answering, spoken: list[Token]) -> None:
    response = client.responses.create(
        model=MODEL, input="France?", include=["message.output_text.logprobs"], top_logprobs=1
    )
    item: Any = response.output[0]
    part = item.content[0]
    assert [each.logprob for each in part.logprobs] == [-0.5] * len(spoken)
    assert len(part.logprobs[0].top_logprobs) == 1


def test_in_background(
    client: openai.OpenAI, worker: ScriptedWorker, rooms: Rooms, spoken: list[Token]
) -> None:
    response = client.responses.create(model=MODEL, input="France?", background=True)
    assert (response.status, response.background, response.output) == ("queued", True, [])
    claimed = worker.claim()
    worker.emit(claimed, spoken[:1])
    assert client.responses.retrieve(response.id).status == "in_progress"
    with pytest.raises(openai.ConflictError):
        client.responses.create(model=MODEL, input="And?", previous_response_id=response.id)
    worker.emit(claimed, spoken[1:], Finish("stop"))
    ended = client.responses.retrieve(response.id)
    assert (ended.status, ended.output_text) == ("completed", TEXT)
    assert client.responses.cancel(response.id).status == "completed", "too late, and no error"


def test_cancel(client: openai.OpenAI, worker: ScriptedWorker, rooms: Rooms, spoken: list[Token]) -> None:
    response = client.responses.create(model=MODEL, input="France?", background=True)
    claimed = worker.claim()
    worker.emit(claimed, spoken[:2])
    cancelled = client.responses.cancel(response.id)
    assert cancelled.status == "cancelled"
    assert cancelled.output_text == "".join(token.text for token in spoken[:2])
    assert client.responses.cancel(response.id) == cancelled
    record = rooms.record(claimed.hold.request_id)
    assert record
    assert record.state is State.CANCELLED


def test_delete_cancels(client: openai.OpenAI, worker: ScriptedWorker, rooms: Rooms) -> None:
    response = client.responses.create(model=MODEL, input="France?", background=True)
    request_id = worker.claim().hold.request_id
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    record = rooms.record(request_id)
    assert record
    assert record.state is State.CANCELLED


def test_what_failed_tells_why(client: openai.OpenAI, worker: ScriptedWorker, rooms: Rooms) -> None:
    response = client.responses.create(model=MODEL, input="France?", background=True)
    rooms.fail(worker.claim().hold, "engine_failed", "It broke.")
    failed = client.responses.retrieve(response.id)
    assert failed.status == "failed"
    assert failed.error
    assert (failed.error.code, failed.error.message) == ("server_error", "It broke.")
    events = list(client.responses.retrieve(response.id, stream=True))
    assert [event.type for event in events][-1] == "response.failed"


def test_a_wrong_argument_is_refused_before_anything_is_accepted(
    gateway: GatewayProcess, worker: ScriptedWorker, rooms: Rooms
) -> None:
    before = rooms.list_requests(1)
    body = {"model": MODEL, "input": "France?", "stream": True}
    refused = gateway.call("POST", "/v1/responses?starting_after=x", body)
    assert (refused.status, refused.body["error"]["param"]) == (400, "starting_after")
    assert rooms.list_requests(1) == before


@pytest.mark.parametrize("how", ["starting_after", "Last-Event-ID"])
def test_a_background_stream_goes_on_anywhere(
    valkey: RedisServer,
    gateway: GatewayProcess,
    worker: ScriptedWorker,
    spoken: list[Token],
    tmp_path_factory: pytest.TempPathFactory,
    how: str,
) -> None:
    """The first client leaves in the middle, the request goes on, and another gateway tells the rest."""
    body = {"model": MODEL, "input": "France?", "background": True, "stream": True}
    stream = gateway.stream("POST", "/v1/responses", body)
    claimed = worker.claim()
    worker.emit(claimed, spoken[:2])
    seen = stream.events(7)
    assert [event.event_id for event in seen] == [event.data["sequence_number"] for event in seen]
    assert [event.name for event in seen][:3] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    stream.close()
    response_id = seen[0].data["response"]["id"]
    with GatewayProcess(valkey.url, MODEL, tmp_path_factory.mktemp("other") / "log") as other:
        path = f"/v1/responses/{response_id}?stream=true"
        if how == "starting_after":
            stream = other.stream("GET", f"{path}&starting_after={seen[-1].event_id}")
        else:
            stream = other.stream("GET", path, None, Last_Event_ID=str(seen[-1].event_id))
        worker.emit(claimed, spoken[2:], Finish("stop"))
        rest = stream.events()
        again = other.stream("GET", path).events()
    told = seen + rest
    assert [event.event_id for event in told] == list(range(len(told)))
    assert "".join(event.data["delta"] for event in told if event.name.endswith("delta")) == TEXT
    assert told[-1].name == "response.completed"
    assert [event.name for event in again] == [event.name for event in told]


def test_a_client_that_says_to_have_more_than_there_is_is_told(
    client: openai.OpenAI, gateway: GatewayProcess, answering: Answering
) -> None:
    path = f"/v1/responses/{client.responses.create(model=MODEL, input='x').id}?stream=true&starting_after="
    last = gateway.stream("GET", f"{path}0").events()[-1].event_id
    assert gateway.stream("GET", f"{path}{last}").events() == []
    (error,) = gateway.stream("GET", f"{path}9999").events()
    assert (error.name, error.data["code"]) == ("error", "position_ahead")


def test_a_client_that_leaves_cancels_what_is_not_in_background(
    gateway: GatewayProcess, worker: ScriptedWorker, rooms: Rooms, spoken: list[Token]
) -> None:
    stream = gateway.stream("POST", "/v1/responses", {"input": "France?", "stream": True})
    claimed = worker.claim()
    worker.emit(claimed, spoken[:1])
    stream.events(5)
    stream.close()

    def cancelled() -> bool:
        record = rooms.record(claimed.hold.request_id)
        return record is not None and record.state is State.CANCELLED

    eventually(cancelled, "the request is cancelled")


def test_what_is_not_stored_is_not_found(client: openai.OpenAI, answering: Answering) -> None:
    response = client.responses.create(model=MODEL, input="France?", store=False)
    assert response.output_text == TEXT + HELD
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_the_same_key_is_the_same_response(client: openai.OpenAI, answering: Answering) -> None:
    first, again = [
        client.responses.create(model=MODEL, input="France?", extra_headers={"Idempotency-Key": "same"})
        for _ in range(2)
    ]
    assert first == again
    assert len(answering.claimed) == 1


def test_a_stream_with_a_key_goes_on_where_it_broke(
    gateway: GatewayProcess, worker: ScriptedWorker, spoken: list[Token]
) -> None:
    body, key = {"input": "France?", "stream": True}, {"Idempotency_Key": "broken"}
    stream = gateway.stream("POST", "/v1/responses", body, **key)
    claimed = worker.claim()
    worker.emit(claimed, spoken[:2])
    seen = stream.events(5)
    stream.close()
    stream = gateway.stream("POST", "/v1/responses", body, Last_Event_ID=str(seen[-1].event_id), **key)
    worker.emit(claimed, spoken[2:], Finish("stop"))
    told = seen + stream.events()
    assert [event.event_id for event in told] == list(range(len(told)))
    assert told[-1].data["response"]["output"][0]["content"][0]["text"] == TEXT


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": "x", "background": True, "store": False}, None),
        ({"input": "x", "temperature": 3}, "temperature"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "max_output_tokens": 100_000}, "max_output_tokens"),
        ({"input": "x", "truncation": "some"}, "truncation"),
        ({"input": "x", "include": ["file_search_call.results"]}, "include"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"input": "x", "conversation": "conv_1"}, "conversation"),
        ({"input": "x", "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"input": "x", "n": 2}, "n"),
        ({"input": "x", "suffix": "y"}, "suffix"),
        ({"input": "x", "max_tokens": 5}, "max_tokens"),
        ({"input": "x", "max_completion_tokens": 5}, "max_completion_tokens"),
        ({"input": "x", "messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"input": "x", "response_format": {"type": "json_object"}}, "response_format"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "stream_options": {"include_usage": True}}, None),
        (
            {"input": "x", "stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        (
            {"input": "x", "stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
        ({"input": "x", "metadata": {"a": 1}}, "metadata.a"),
    ],
)
def test_what_is_refused_is_named(
    gateway: GatewayProcess, worker: ScriptedWorker, body: dict[str, Any], param: str | None
) -> None:
    reply = gateway.call("POST", "/v1/responses", body)
    assert reply.status == 400, reply.body
    found = reply.body["error"]["param"]
    assert found == param or (param and found.startswith(param)), reply.body


def test_a_response_shows_what_it_has(
    client: openai.OpenAI, gateway: GatewayProcess, answering: Answering
) -> None:
    logprobs: Any = "message.output_text.logprobs"
    plain = client.responses.create(model=MODEL, input="x")
    full = client.responses.create(model=MODEL, input="x", include=[logprobs])
    assert client.responses.retrieve(full.id, include=[logprobs]).id == full.id
    for path in (f"/v1/responses/{plain.id}", f"/v1/responses/{plain.id}/input_items"):
        for query, param in (
            (f"include[]={logprobs}", "include"),
            ("include=file_search_call.results", "include"),
            ("include_obfuscation=true", "include_obfuscation"),
        ):
            reply = gateway.call("GET", f"{path}?{query}")
            assert (reply.status, reply.body["error"]["param"]) == (400, param)
    assert gateway.call("GET", f"/v1/responses/{full.id}?include_obfuscation=false").status == 200


WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def test_a_call_of_a_tool_and_what_it_gave(
    client: openai.OpenAI, worker: ScriptedWorker, rooms: Rooms, tokenizer: Tokenizer
) -> None:
    ask: Any = {"model": MODEL, "tools": [WEATHER]}
    with Answering(worker, words(tokenizer, f"I look. {CALL}"), Finish("stop")).running():
        first = client.responses.create(**ask, input="How is Rome?")
        events = list(client.responses.create(**ask, input="How is Rome?", stream=True))
    message, call = first.output
    assert message.type == "message"
    assert first.output_text == "I look."
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments), call.status) == ("weather", {"city": "Rome"}, "completed")
    assert client.responses.retrieve(first.id).output == first.output

    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    deltas = ("output_text.delta", "function_call_arguments.delta")
    assert [name for name in names if name not in deltas] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.done", "output_item.done", "completed"),
    ]
    arguments = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    assert json.loads(arguments) == {"city": "Rome"}
    (said,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert said.arguments == arguments
    last = events[-1]
    assert last.type == "response.completed"
    assert [item.type for item in last.response.output] == ["message", "function_call"]

    given: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}]
    with Answering(worker, words(tokenizer, "Rain."), Finish("stop")).running() as answering:
        second = client.responses.create(**ask, previous_response_id=first.id, input=given)
        assert second.output_text == "Rain."
        asked = prompt(answering, tokenizer)
    places = [asked.index(text) for text in ("How is Rome?", "I look.", '"Rome"', "It rains.")]
    assert places == sorted(places)


def test_output_may_come_back_as_input(
    client: openai.OpenAI, worker: ScriptedWorker, tokenizer: Tokenizer
) -> None:
    """As clients do that keep the conversation themselves."""
    ask: Any = {"model": MODEL, "tools": [WEATHER], "store": False}
    with Answering(worker, words(tokenizer, f"I look. {CALL}"), Finish("stop")).running() as answering:
        first = client.responses.create(**ask, input="How is Rome?")
        call: Any = first.output[-1]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
        history: Any = [{"role": "user", "content": "How is Rome?"}, *first.output, result]
        client.responses.create(**ask, input=history)
        asked = prompt(answering, tokenizer)
    places = [asked.index(text) for text in ("How is Rome?", "I look.", '"Rome"', "It rains.")]
    assert places == sorted(places)


class Place(BaseModel):
    city: str
    people: int


def test_an_answer_in_the_form_of_a_model(
    client: openai.OpenAI, worker: ScriptedWorker, tokenizer: Tokenizer
) -> None:
    answer = '{"city": "Rome", "people": 3}'
    with Answering(worker, words(tokenizer, answer), Finish("stop")).running() as answering:
        response = client.responses.parse(model=MODEL, input="Where?", text_format=Place)
        assert answering.claimed[-1].params.grammar
    assert response.output_parsed == Place(city="Rome", people=3)


def test_a_demanded_call_is_forced(gateway: GatewayProcess, answering: Answering) -> None:
    body = {"input": "x", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}}
    reply = gateway.call("POST", "/v1/responses", body)
    assert reply.status == 200, reply.body
    assert "weather" in (answering.claimed[-1].params.grammar or "")
    assert reply.body["tool_choice"] == body["tool_choice"]


def test_a_schema_becomes_a_grammar(gateway: GatewayProcess, answering: Answering) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    form = {"type": "json_schema", "name": "place", "schema": schema}
    reply = gateway.call("POST", "/v1/responses", {"input": "x", "text": {"format": form}})
    assert reply.status == 200
    assert reply.body["text"]["format"] == form
    grammar = answering.claimed[-1].params.grammar
    assert grammar
    assert "city" in json.dumps(grammar)
