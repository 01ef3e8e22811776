"""POST /generate, as SGLang's clients use it, with a scripted worker behind it."""

import json
import secrets
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.generation.view import LEAST_LOGPROB
from relay.answers import Emission, Prefilled
from relay.prompt_logprobs import PromptLogprobs
from relay.request import Finish
from relay.rooms import Rooms
from relay.stamps import Stamps
from relay.stretches import Stretch
from relay.tokenizer import Tokenizer
from tests.gateway_rig import (
    Answering,
    EventStream,
    GatewayProcess,
    ScriptedWorker,
    words,
)
from tests.servers import RedisServer

MODEL = f"generate-{secrets.token_hex(4)}"
TEXT = " a small answer"


def ask(gateway: GatewayProcess, **body: Any) -> Any:
    reply = gateway.call("POST", "/generate", body)
    assert reply.status == 200, reply.raw
    return reply.body


def test_one_prompt_has_one_answer(
    gateway: GatewayProcess, answering: Answering, tokenizer: Tokenizer
) -> None:
    how = {"max_new_tokens": 9, "temperature": 0.0, "sampling_seed": 5, "min_new_tokens": 2}
    reply = ask(gateway, text="Hello", sampling_params=how, lora_path=None, rid="mine")
    assert reply["text"] == TEXT
    assert reply["output_ids"] == tokenizer.encode(TEXT)
    about = reply["meta_info"]
    assert about["finish_reason"] == {"type": "stop", "matched": None}
    assert about["prompt_tokens"] == len(tokenizer.encode("Hello"))
    assert (about["completion_tokens"], about["cached_tokens"]) == (len(reply["output_ids"]), 3)
    assert about["e2e_latency"] > 0
    params = answering.claimed[-1].params
    assert (params.max_tokens, params.min_tokens, params.temperature, params.seed) == (9, 2, 0.0, 5)


@pytest.mark.parametrize("stream", [False, True])
def test_the_same_key_gives_the_same_bytes(
    gateway: GatewayProcess, answering: Answering, stream: bool
) -> None:
    body = {"text": "Hello", "stream": stream, "sampling_params": {"n": 2}}
    first, again = [
        gateway.call("POST", "/generate", body, Idempotency_Key=f"generate-{stream}") for _ in range(2)
    ]
    assert (first.status, sorted(first.raw.splitlines())) == (200, sorted(again.raw.splitlines()))
    assert len(answering.claimed) == 2


def test_a_stream_with_a_key_goes_on_at_another_gateway(
    gateway: GatewayProcess,
    worker: ScriptedWorker,
    tokenizer: Tokenizer,
    valkey: RedisServer,
    tmp_path: Path,
) -> None:
    body, key = {"text": "Hello", "stream": True}, {"Idempotency_Key": "moves"}
    stream = gateway.stream("POST", "/generate", body, **key)
    claimed, spoken = worker.claim(), words(tokenizer, TEXT)
    worker.emit(claimed, spoken[:2])
    first = stream.events(2)
    stream.close()
    with GatewayProcess(valkey.url, MODEL, tmp_path / "log") as other:
        stream = other.stream("POST", "/generate", body, Last_Event_ID=str(first[-1].event_id), **key)
        worker.emit(claimed, spoken[2:], Finish("stop", None, ""))
        *rest, done = stream.events()
    assert done.data == "[DONE]"
    assert [event.event_id for event in first + rest] == list(range(1, len(spoken) + 2))
    assert rest[-1].data["text"] == TEXT
    assert rest[-1].data["meta_info"]["finish_reason"]["type"] == "stop"


def test_defaults_are_those_of_its_clients(gateway: GatewayProcess, answering: Answering) -> None:
    ask(gateway, input_ids=[1, 2, 3])
    assert answering.claimed[-1].params.max_tokens == 128
    assert answering.claimed[-1].prompt_ids == (1, 2, 3)


@pytest.mark.parametrize("prompts", [{"text": ["a", "b"]}, {"input_ids": [[1], [2]]}, {"text": ["a"]}])
def test_a_list_has_a_list(gateway: GatewayProcess, answering: Answering, prompts: Any) -> None:
    replies = ask(gateway, **prompts, sampling_params={"max_new_tokens": 9})
    (given,) = prompts.values()
    assert [reply["text"] for reply in replies] == [TEXT] * len(given)


def test_a_chunk_tells_all_so_far(gateway: GatewayProcess, answering: Answering) -> None:
    stream = gateway.stream("POST", "/generate", {"text": "Hello", "stream": True})
    *chunks, done = [event.data for event in stream.events()]
    stream.close()
    assert done == "[DONE]"
    texts = [chunk["text"] for chunk in chunks]
    assert texts[-1] == TEXT
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    counts = [chunk["meta_info"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert [chunk["meta_info"]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "stop"


def test_chunks_of_a_list_have_their_place(gateway: GatewayProcess, answering: Answering) -> None:
    stream = gateway.stream("POST", "/generate", {"text": ["a", "b"], "stream": True})
    *chunks, _ = [event.data for event in stream.events()]
    stream.close()
    for index in (0, 1):
        assert [chunk["text"] for chunk in chunks if chunk["index"] == index][-1] == TEXT


def test_log_probabilities(gateway: GatewayProcess, answering: Answering) -> None:
    reply = ask(gateway, text="Hello", return_logprob=True, top_logprobs_num=2)
    about, ids = reply["meta_info"], reply["output_ids"]
    assert [entry[:2] for entry in about["output_token_logprobs"]] == [[-0.5, i] for i in ids]
    assert [len(top) for top in about["output_top_logprobs"]] == [2] * len(ids)


def test_log_probabilities_with_the_text_of_tokens(
    gateway: GatewayProcess, answering: Answering, tokenizer: Tokenizer
) -> None:
    reply = ask(gateway, text="Hello", return_logprob=True, return_text_in_logprobs=True)
    about, ids = reply["meta_info"], reply["output_ids"]
    shown = [[-0.5, i, tokenizer.token_text(i)] for i in ids]
    assert about["output_token_logprobs"] == shown


def test_what_stands_beside_the_sampling_parameters(
    gateway: GatewayProcess, answering: Answering, rooms: Rooms
) -> None:
    ask(gateway, text="Hello", model=MODEL, priority=7, extra_key="mine")
    (claimed,) = answering.claimed
    assert claimed.params.cache_salt == "mine"
    redis: Any = rooms.redis
    stored = redis.hget(f"{rooms.root}:req:{claimed.hold.request_id}", "priority")
    assert int(stored) == -7, "a higher one is served first here"
    assert gateway.call("POST", "/generate", {"text": "a", "model": "other"}).status == 404


SCORES = PromptLogprobs(
    np.array([[2, 9, 8], [3, 7, 6]], np.int32),
    np.array([[-1.0, -0.25, -0.5], [-2.0, -0.125, -np.inf]], np.float32),
    np.array([3, 4], np.int32),
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("start", [0, 1, 2])
def test_the_likelihood_of_the_prompt(
    gateway: GatewayProcess, worker: ScriptedWorker, start: int, stream: bool
) -> None:
    asked = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 2, "stream": stream}
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 0}, **asked}
    connection = gateway.open("POST", "/generate", body)
    claimed = worker.claim()
    assert claimed.params.prompt_logprobs == 2
    prefilled = Prefilled(Stamps(0, chunks=(Stretch(1.7e12, 1.7e12 + 15.0, 3),)), SCORES)
    worker.rooms.emit([Emission(claimed.hold, 0, [], Finish("length"), prefilled)])
    if stream:
        *_, last, done = EventStream(connection).events()
        assert done.data == "[DONE]"
        about = last.data["meta_info"]
    else:
        about = json.loads(connection.getresponse().read())["meta_info"]
    connection.close()
    own = [[-1.0, 2, None], [-2.0, 3, None]]
    best = [[[-0.25, 9, None], [-0.5, 8, None]], [[-0.125, 7, None], [LEAST_LOGPROB, 6, None]]]
    assert about["input_token_logprobs"] == [[None, start + 1, None], *own[start:]]
    assert about["input_top_logprobs"] == [None, *best[start:]]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"text": "a", "input_ids": [1]}, None),
        ({"text": 3}, "text"),
        ({"text": "a", "sampling_params": 3}, "sampling_params"),
        ({"text": "a", "sampling_params": {"temperature": 3}}, "temperature"),
        ({"text": "a", "sampling_params": {"stop_regex": "x"}}, "stop_regex"),
        ({"text": "a", "sampling_params": {"stream": True}}, "sampling_params"),
        ({"text": "a", "sampling_params": {"echo": True}}, "sampling_params"),
        ({"text": "a", "sampling_params": {"structural_tag": "x"}}, "structural_tag"),
        ({"text": "a", "temperature": 0}, "temperature"),
        ({"text": "a", "priority": 101}, "priority"),
        ({"text": "a", "extra_key": "x", "cache_salt": "y"}, "extra_key"),
        ({"text": "a", "top_logprobs_num": 2}, "top_logprobs_num"),
        ({"text": "a", "logprob_start_len": 0}, "logprob_start_len"),
        ({"input_ids": [1, 2], "return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "image_data": "x"}, "image_data"),
    ],
)
def test_what_is_wrong_is_named(
    gateway: GatewayProcess, worker: ScriptedWorker, body: Any, param: str | None
) -> None:
    reply = gateway.call("POST", "/generate", body)
    assert reply.status == 400, reply.raw
    assert reply.body["error"]["param"] == param
    assert all(record.state.terminal for record in worker.rooms.list_requests(99)), "nothing is recorded"
