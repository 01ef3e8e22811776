"""The OpenAI views, as the unmodified `openai` client and raw HTTP meet them."""

import secrets
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from relay.request import Finish, Record, State, Token
from relay.rooms import Rooms
from relay.tokenizer import Tokenizer
from tests.gateway_rig import (
    Answering,
    GatewayProcess,
    ScriptedWorker,
    eventually,
    wait_for_followers,
)
from tests.servers import RedisServer

MODEL = f"openai-{secrets.token_hex(4)}"
TEXT = " Paris is the capital."
HELD = " It"
CHAT: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Capital of France?"}]


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL).model_dump()["max_model_len"] == 8192
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-9")
    assert caught.value.code == "model_not_found"


def test_a_completion(client: openai.OpenAI, answering: Answering, spoken: list[Token]) -> None:
    reply = client.completions.create(
        model=MODEL, prompt="The capital of France?", stop=["\n", "END"], seed=5
    )
    (choice,) = reply.choices
    assert reply.id.startswith("cmpl-req-")
    assert (choice.text, choice.finish_reason, choice.logprobs) == (TEXT + HELD, "stop", None)
    assert reply.usage
    assert reply.usage.completion_tokens == len(spoken)
    assert reply.usage.prompt_tokens == len(answering.claimed[0].prompt_ids)
    assert reply.usage.prompt_tokens_details
    assert reply.usage.prompt_tokens_details.cached_tokens == 3
    params = answering.claimed[0].params
    assert (params.max_tokens, params.seed, params.stop, params.temperature) == (16, 5, ("\n", "END"), 1.0)


def test_completion_logprobs(
    client: openai.OpenAI, answering: Answering, spoken: list[Token], tokenizer: Tokenizer
) -> None:
    reply = client.completions.create(model=MODEL, prompt="France", logprobs=1)
    logprobs = reply.choices[0].logprobs
    assert logprobs
    assert logprobs.tokens == [tokenizer.token_text(token.token_id) for token in spoken]
    assert logprobs.token_logprobs == [-0.5] * len(spoken)
    assert logprobs.top_logprobs
    assert logprobs.top_logprobs[0] == {" Paris": -0.5}
    starts = [len("".join(token.text for token in spoken[:i])) for i in range(len(spoken))]
    assert logprobs.text_offset == starts
    assert answering.claimed[-1].params.logprobs == 1


def test_a_streamed_completion(client: openai.OpenAI, answering: Answering, spoken: list[Token]) -> None:
    options: Any = {"include_usage": True}
    stream = client.completions.create(
        model=MODEL, prompt="France", stream=True, stream_options=options, logprobs=0
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT + HELD
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * len(spoken) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage
    assert last.usage.total_tokens == len(spoken) + last.usage.prompt_tokens
    logprobs = [chunk.choices[0].logprobs for chunk in chunks[:-1]]
    offsets = [each.text_offset[0] for each in logprobs if each and each.text_offset]
    assert offsets == [len("".join(token.text for token in spoken[:i])) for i in range(len(spoken))]


def test_usage_on_every_chunk_when_asked(client: openai.OpenAI, answering: Answering) -> None:
    options: Any = {"continuous_usage_stats": True}
    stream = client.completions.create(model=MODEL, prompt="France", stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage]
    assert counts == sorted(counts)
    assert counts[-1] > 0


def test_a_chat(
    client: openai.OpenAI, answering: Answering, spoken: list[Token], tokenizer: Tokenizer
) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=CHAT, logprobs=True, top_logprobs=2)
    (choice,) = reply.choices
    assert reply.id.startswith("chatcmpl-req-")
    assert (choice.message.role, choice.message.content) == ("assistant", TEXT + HELD)
    assert choice.finish_reason == "stop"
    assert choice.logprobs
    assert choice.logprobs.content
    first = choice.logprobs.content[0]
    assert (first.token, first.logprob, first.bytes) == (" Paris", -0.5, list(b" Paris"))
    assert [entry.logprob for entry in first.top_logprobs] == [-0.5, -1.5]
    claimed = answering.claimed[0]
    rendered = tokenizer.apply_chat_template(CHAT)
    assert list(claimed.prompt_ids) == tokenizer.encode(rendered, add_special_tokens=False)
    assert claimed.params.max_tokens == 4096 - len(claimed.prompt_ids)


def test_a_streamed_chat(client: openai.OpenAI, answering: Answering, spoken: list[Token]) -> None:
    stream = client.chat.completions.create(model=MODEL, messages=CHAT, stream=True, max_completion_tokens=9)
    first, *chunks = list(stream)
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT + HELD
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in chunks}) == 1
    assert answering.claimed[0].params.max_tokens == 9


def test_the_end_of_a_stream_is_done(gateway: GatewayProcess, answering: Answering) -> None:
    body = {"prompt": "France", "stream": True, "unknown_field": 1, "user": None}
    events = gateway.stream("POST", "/v1/completions", body).events()
    assert events[-1].data == "[DONE]"
    assert all(event.data["choices"] for event in events[:-1])


@pytest.mark.parametrize(
    ("arguments", "error", "code"),
    [
        ({"model": "other"}, openai.NotFoundError, "model_not_found"),
        ({"n": 200}, openai.BadRequestError, "invalid_value"),
        ({"max_tokens": 9000}, openai.BadRequestError, "context_length_exceeded"),
    ],
)
def test_the_client_raises_by_status(
    client: openai.OpenAI,
    worker: ScriptedWorker,
    arguments: Any,
    error: type[openai.APIStatusError],
    code: str,
) -> None:
    with pytest.raises(error) as caught:
        client.completions.create(**({"model": MODEL, "prompt": "France"} | arguments))
    assert caught.value.code == code


def test_a_request_that_fails_is_an_error(
    gateway: GatewayProcess, worker: ScriptedWorker, rooms: Rooms
) -> None:
    for code, status in (("crashed", 500), ("timeout", 504), ("no_token_left", 400)):
        connection = gateway.open("POST", "/v1/completions", {"prompt": "France"})
        assert rooms.fail(worker.claim().hold, code, "It went wrong.").ok
        response = connection.getresponse()
        assert response.status == status
        assert f'"code":"{code}"'.encode() in response.read().replace(b": ", b":")
        connection.close()


def test_a_failure_in_mid_stream_is_told_in_the_stream(
    gateway: GatewayProcess, worker: ScriptedWorker, rooms: Rooms, spoken: list[Token]
) -> None:
    stream = gateway.stream("POST", "/v1/chat/completions", {"messages": CHAT, "stream": True})
    claimed = worker.claim()
    worker.emit(claimed, spoken[:1])
    assert rooms.fail(claimed.hold, "crashed", "It went wrong.").ok
    events = stream.events()
    assert events[-2].data["error"]["code"] == "crashed"
    assert events[-1].data == "[DONE]"


def ended(rooms: Rooms, request_id: str) -> Record:
    def terminal() -> bool:
        record = rooms.record(request_id)
        return record is not None and record.state.terminal

    eventually(terminal, "the end of the request")
    record = rooms.record(request_id)
    assert record
    return record


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("spoken_before", [0, 2])
def test_a_client_that_leaves_cancels(
    gateway: GatewayProcess,
    worker: ScriptedWorker,
    rooms: Rooms,
    spoken: list[Token],
    stream: bool,
    spoken_before: int,
) -> None:
    body = {"prompt": "France", "stream": stream}
    connection = gateway.open("POST", "/v1/completions", body)
    claimed = worker.claim()
    if spoken_before:
        worker.emit(claimed, spoken[:spoken_before])
    connection.close()
    assert ended(rooms, claimed.hold.request_id).state is State.CANCELLED


def test_with_a_key_the_request_survives_its_client_and_a_retry_finds_it(
    gateway: GatewayProcess, worker: ScriptedWorker, rooms: Rooms, spoken: list[Token]
) -> None:
    key = secrets.token_hex(8)
    connection = gateway.open("POST", "/v1/completions", {"prompt": "France"}, Idempotency_Key=key)
    claimed = worker.claim()
    connection.close()
    wait_for_followers(gateway, 0)
    worker.emit(claimed, spoken, Finish("stop"))
    retry = gateway.call("POST", "/v1/completions", {"prompt": "France"}, Idempotency_Key=key)
    assert retry.body["choices"][0]["text"] == TEXT
    assert retry.body["id"] == f"cmpl-{claimed.hold.request_id}"


def test_a_silent_stream_reaches_a_client_that_trims_what_arrives(
    gateway: GatewayProcess, worker: ScriptedWorker, spoken: list[Token]
) -> None:
    """vLLM's benchmark strips each piece: a heartbeat must leave nothing to glue to the next event."""
    body = {"prompt": "Paris", "max_tokens": 32, "stream": True}
    with httpx.stream("POST", f"{gateway.url}/v1/completions", json=body, timeout=30) as response:
        pieces = response.iter_bytes()
        claimed = worker.claim()
        assert next(pieces).strip() == b""
        worker.emit(claimed, spoken, Finish("stop", None, HELD))
        events = b"".join(pieces).decode()
    assert events.startswith("data: ")
    assert events.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_with_a_key_goes_on_where_it_broke_at_another_gateway(
    gateway: GatewayProcess,
    worker: ScriptedWorker,
    spoken: list[Token],
    path: str,
    valkey: RedisServer,
    tmp_path: Path,
) -> None:
    words = {"messages": CHAT} if "chat" in path else {"prompt": "France"}
    body = {**words, "stream": True, "stream_options": {"include_usage": True}}
    key = {"Idempotency_Key": f"broken-{path}"}
    stream = gateway.stream("POST", path, body, **key)
    claimed = worker.claim()
    worker.emit(claimed, spoken[:3])
    first = stream.events(3)
    stream.close()
    seen = str(first[-1].event_id)
    with GatewayProcess(valkey.url, MODEL, tmp_path / "log") as other:
        stream = other.stream("POST", path, body, Last_Event_ID=seen, **key)
        worker.emit(claimed, spoken[3:], Finish("stop", None, HELD))
        *rest, usage, done = stream.events()
    assert (usage.data["choices"], done.data) == ([], "[DONE]")
    told = [event.data["choices"][0] for event in first + rest]
    assert "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in told) == TEXT + HELD
    start = 0 if "chat" in path else 1
    numbered = [event.event_id for event in first + rest if event.event_id is not None]
    assert numbered == list(range(start, len(spoken) + 2))
    again = gateway.stream("POST", path, body, **key).events()
    assert len(again) == len(first + rest) + 2


def test_a_client_that_says_to_have_more_than_there_is_is_told(
    gateway: GatewayProcess, answering: Answering
) -> None:
    body, key = {"prompt": "France", "stream": True}, {"Idempotency_Key": "ahead"}
    *_, last, done = gateway.stream("POST", "/v1/completions", body, **key).events()
    assert done.data == "[DONE]"
    (only,) = gateway.stream(
        "POST", "/v1/completions", body, Last_Event_ID=str(last.event_id), **key
    ).events()
    assert only.data == "[DONE]"
    error, done = gateway.stream("POST", "/v1/completions", body, Last_Event_ID="999", **key).events()
    assert (error.data["error"]["code"], done.data) == ("position_ahead", "[DONE]")


def test_a_stream_without_a_key_has_plain_chunks(
    client: openai.OpenAI, gateway: GatewayProcess, answering: Answering
) -> None:
    events = gateway.stream("POST", "/v1/completions", {"prompt": "France", "stream": True}).events()
    assert {event.event_id for event in events} == {None}


@pytest.mark.parametrize("headers", [{}, {"Idempotency_Key": "never came"}])
def test_nothing_to_go_on_with(gateway: GatewayProcess, worker: ScriptedWorker, headers: Any) -> None:
    body = {"prompt": "France", "stream": True}
    reply = gateway.call("POST", "/v1/completions", body, Last_Event_ID="2", **headers)
    assert (reply.status, reply.body["error"]["param"]) == (404, "Last-Event-ID")


@pytest.mark.parametrize("stream", [False, True])
def test_the_same_key_gives_the_same_bytes(
    gateway: GatewayProcess, answering: Answering, stream: bool
) -> None:
    body = {"messages": CHAT, "stream": stream}
    first, again = [
        gateway.call("POST", "/v1/chat/completions", body, Idempotency_Key=f"bytes-{stream}")
        for _ in range(2)
    ]
    assert first.raw == again.raw
    assert len(answering.claimed) == 1
