"""Several samples and several prompts in one call, as the `openai` client and raw HTTP meet them."""

import json
import secrets
from collections import Counter
from typing import Any

import openai
import pytest

from relay.request import Claimed, Finish, State, Token
from relay.rooms import Rooms
from relay.tokenizer import Tokenizer
from tests.gateway_rig import (
    Answering,
    GatewayProcess,
    ScriptedWorker,
    eventually,
    wait_for_followers,
)

MODEL = f"samples-{secrets.token_hex(4)}"
TEXT = " Paris is the capital."
HELD = " It"
CHAT: Any = [{"role": "user", "content": "Capital of France?"}]
MOST_OPEN = 20
GATEWAY = {"MAX_OPEN_REQUESTS": str(MOST_OPEN)}


def claim_group(worker: ScriptedWorker, leaders: int, forks: int) -> list[Claimed]:
    """Every sample of `leaders` prompts, prompt by prompt."""
    found = []
    for _ in range(leaders):
        leader = worker.claim()
        nonces = [secrets.token_hex(8) for _ in range(forks)]
        forked = worker.rooms.claim_forks(leader.hold, worker.boot, 60_000, nonces).claimed
        assert len(forked) == forks
        found += [leader, *forked]
    return sorted(found, key=lambda claimed: number(claimed.hold.request_id))


def number(request_id: str) -> int:
    """Which of its group a request is: `req-<hex>` is the first, `req-<hex>-7` the eighth."""
    _, _, *last = request_id.split("-")
    return int(last[0]) if last else 0


def token(position: int, text: str, logprob: float = -0.5) -> Token:
    return Token(position, 100 + position, text, [[100 + position, logprob]])


# ---- whole answers


def test_choices_come_prompt_by_prompt(
    client: openai.OpenAI, answering: Answering, spoken: list[Token], tokenizer: Tokenizer
) -> None:
    prompts = ["The capital of France?", "France"]
    reply = client.completions.create(model=MODEL, prompt=prompts, n=3, seed=5)
    assert [choice.index for choice in reply.choices] == list(range(6))
    assert {(choice.text, choice.finish_reason) for choice in reply.choices} == {(TEXT + " It", "stop")}
    ids = [tuple(tokenizer.encode(prompt)) for prompt in prompts]
    assert reply.usage
    assert reply.usage.prompt_tokens == sum(map(len, ids)), "a prompt counts once"
    assert reply.usage.completion_tokens == 6 * len(spoken)
    assert reply.usage.prompt_tokens_details
    assert reply.usage.prompt_tokens_details.cached_tokens == 2 * 3
    asked = sorted(answering.claimed, key=lambda claimed: number(claimed.hold.request_id))
    assert [claimed.prompt_ids for claimed in asked] == [ids[0]] * 3 + [ids[1]] * 3
    first = asked[0].params
    assert [claimed.params.seed for claimed in asked] == [first.sample(i).seed for i in range(3)] * 2
    assert first.seed == 5


def test_without_a_seed_each_sample_has_its_own(client: openai.OpenAI, answering: Answering) -> None:
    client.completions.create(model=MODEL, prompt=[[1, 2], [1, 2]], n=2)
    assert len({claimed.params.seed for claimed in answering.claimed}) == 4


def test_samples_of_a_chat(client: openai.OpenAI, answering: Answering) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=CHAT, n=2, logprobs=True)
    assert [(choice.index, choice.message.content) for choice in reply.choices] == [
        (0, TEXT + " It"),
        (1, TEXT + " It"),
    ]
    assert all(choice.logprobs for choice in reply.choices)


def test_an_echo_is_of_the_own_prompt(client: openai.OpenAI, answering: Answering) -> None:
    reply = client.completions.create(model=MODEL, prompt=["One.", "Two."], echo=True)
    assert [choice.text for choice in reply.choices] == [f"One.{TEXT} It", f"Two.{TEXT} It"]


def test_the_best_of_several(gateway: GatewayProcess, worker: ScriptedWorker) -> None:
    body = {"prompt": ["France", "Spain"], "best_of": 3, "n": 2}
    connection = gateway.open("POST", "/v1/completions", body)
    samples = claim_group(worker, leaders=2, forks=2)
    logprobs = [-3.0, -1.0, -2.0, -0.1, -0.3, -0.2]
    for claimed, logprob in zip(samples, logprobs):
        assert claimed.params.logprobs == 0, "they are needed to choose"
        worker.emit(claimed, [token(0, f"{logprob}", logprob)], Finish("stop"))
    reply = json.loads(connection.getresponse().read())
    shown = [(choice["index"], choice["text"], choice["logprobs"]) for choice in reply["choices"]]
    assert shown == [(0, "-1.0", None), (1, "-2.0", None), (2, "-0.1", None), (3, "-0.2", None)]
    assert reply["usage"]["completion_tokens"] == 6, "what was not the best was computed too"


# ---- streams


def test_a_stream_of_several_choices(
    client: openai.OpenAI, answering: Answering, spoken: list[Token]
) -> None:
    options: Any = {"include_usage": True}
    stream = client.chat.completions.create(
        model=MODEL, messages=CHAT, n=3, stream=True, stream_options=options
    )
    *chunks, usage = list(stream)
    choices = [chunk.choices[0] for chunk in chunks]
    assert [choice.delta.role for choice in choices[:3]] == ["assistant"] * 3, "one role each, at once"
    for index in range(3):
        mine = [choice for choice in choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in mine) == TEXT + " It"
        assert [choice.delta.role for choice in mine].count("assistant") == 1
        assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
    assert usage.choices == []
    assert usage.usage
    assert usage.usage.completion_tokens == 3 * len(spoken)


def test_chunks_come_as_the_samples_speak(gateway: GatewayProcess, worker: ScriptedWorker) -> None:
    stream = gateway.stream("POST", "/v1/completions", {"prompt": "France", "n": 2, "stream": True})
    leader, fork = claim_group(worker, leaders=1, forks=1)
    told = []
    for claimed, position in ((fork, 0), (leader, 0), (fork, 1), (fork, 2), (leader, 1)):
        worker.emit(claimed, [token(position, f"{number(claimed.hold.request_id)}{position} ")])
        (event,) = stream.events(1)
        told.append((event.data["choices"][0]["index"], event.data["choices"][0]["text"]))
    assert told == [(1, "10 "), (0, "00 "), (1, "11 "), (1, "12 "), (0, "01 ")]
    worker.emit(fork, [], Finish("length"), start=3)
    (event,) = stream.events(1)
    assert (event.data["choices"][0]["index"], event.data["choices"][0]["finish_reason"]) == (1, "length")
    worker.emit(leader, [], Finish("stop"), start=2)
    assert [event.data for event in stream.events()][-1] == "[DONE]"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_goes_on_where_it_broke(gateway: GatewayProcess, worker: ScriptedWorker, path: str) -> None:
    asked = {"messages": CHAT} if "chat" in path else {"prompt": "France"}
    body, key = {**asked, "n": 2, "stream": True}, {"Idempotency_Key": f"broken-{path}"}
    stream = gateway.stream("POST", path, body, **key)
    leader, fork = claim_group(worker, leaders=1, forks=1)
    worker.emit(fork, [token(0, "a"), token(1, "b")], Finish("stop"))
    firsts = 2 if "chat" in path else 0
    seen = stream.events(firsts + 3)
    assert seen[-1].event_id == "0.3", "two tokens and the end of one, nothing of the other"
    stream.close()
    worker.emit(leader, [token(0, "c")])
    stream = gateway.stream("POST", path, body, Last_Event_ID="0.3", **key)
    worker.emit(leader, [token(1, "d")], Finish("stop"))
    rest = stream.events()
    assert [event.event_id for event in rest[:-1]] == ["1.3", "2.3", "3.3"]
    assert {event.data["choices"][0]["index"] for event in rest[:-1]} == {0}
    again = gateway.call("POST", path, body, Last_Event_ID="1", **key)
    assert "must hold 2 numbers" in again.raw.decode()


# ---- what goes wrong


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failing", [0, 1])
def test_one_that_fails_fails_the_answer_and_ends_the_others(
    gateway: GatewayProcess, worker: ScriptedWorker, rooms: Rooms, stream: bool, failing: int
) -> None:
    body = {"prompt": "France", "n": 3, "stream": stream}
    connection = gateway.open("POST", "/v1/completions", body)
    samples = claim_group(worker, leaders=1, forks=2)
    worker.emit(samples[2], [token(0, "x")], Finish("stop"))
    assert rooms.fail(samples[failing].hold, "crashed", "It went wrong.").ok
    response = connection.getresponse()
    told = response.read().decode()
    assert response.status == (200 if stream else 500)
    assert '"code":"crashed"' in told.replace(": ", ":")
    states = Counter[State]()
    for claimed in samples:
        record = rooms.record(claimed.hold.request_id)
        assert record
        eventually(lambda i=claimed.hold.request_id: rooms.record(i).state.terminal, "an end")  # type: ignore[union-attr, misc]
        record = rooms.record(claimed.hold.request_id)
        assert record
        states[record.state] += 1
    assert states == {State.FINISHED: 1, State.FAILED: 1, State.CANCELLED: 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("claimed", [False, True])
def test_a_client_that_leaves_cancels_all(
    gateway: GatewayProcess, worker: ScriptedWorker, rooms: Rooms, stream: bool, claimed: bool
) -> None:
    body = {"prompt": ["France", "Spain"], "n": 2, "stream": stream}
    connection = gateway.open("POST", "/v1/completions", body)
    if claimed:
        claim_group(worker, leaders=2, forks=1)
    else:
        wait_for_followers(gateway, 1)
    ids = [record.request_id for record in rooms.list_requests(4)]
    connection.close()

    def all_cancelled() -> bool:
        return {record.state for i in ids if (record := rooms.record(i))} == {State.CANCELLED}

    eventually(all_cancelled, "the end of all four")
    wait_for_followers(gateway, 0)


def test_a_group_waits_as_one(gateway: GatewayProcess, worker: ScriptedWorker) -> None:
    """It keeps one thread, whatever its samples are."""
    connection = gateway.open("POST", "/v1/completions", {"prompt": ["a", "b"], "n": 4})
    claim_group(worker, leaders=2, forks=3)
    wait_for_followers(gateway, 1)
    connection.close()


def test_a_group_is_accepted_whole_or_not_at_all(
    gateway: GatewayProcess, worker: ScriptedWorker, rooms: Rooms
) -> None:
    too_many = gateway.call("POST", "/v1/completions", {"prompt": ["a", "b", "c"], "n": 7})
    assert (too_many.status, too_many.body["error"]["param"]) == (400, "n")
    assert "3 prompts with 7 samples each are 21" in too_many.body["error"]["message"]
    first = gateway.call("POST", "/v1/requests", {"prompt": "a", "n": 11})
    assert first.status == 202
    refused = gateway.call("POST", "/v1/completions", {"prompt": "a", "n": 10})
    assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
    assert len([r for r in rooms.list_requests(100) if not r.state.terminal]) == 11


def test_a_repeat_with_its_key_is_the_same_answer(
    client: openai.OpenAI, gateway: GatewayProcess, answering: Answering
) -> None:
    body = {"prompt": ["France", "Spain"], "n": 2}
    replies = [gateway.call("POST", "/v1/completions", body, Idempotency_Key="again").body for _ in range(2)]
    assert len(answering.claimed) == 4
    assert [reply["id"] for reply in replies] == [replies[0]["id"]] * 2
    assert replies[0]["choices"] == replies[1]["choices"]
    other = gateway.call("POST", "/v1/completions", {**body, "n": 3}, Idempotency_Key="again")
    assert other.status == 409


def test_native_requests_are_polled_one_by_one(gateway: GatewayProcess, answering: Answering) -> None:
    reply = gateway.call("POST", "/v1/requests", {"prompt": "France", "n": 3}).body
    first, *others = reply["samples"]
    assert (first["id"], first["links"]) == (reply["id"], reply["links"])
    assert [sample["id"] for sample in others] == [f"{reply['id']}-{i}" for i in (1, 2)]
    for sample in reply["samples"]:
        shown = gateway.call("GET", f"{sample['links']['self']}?wait=20").body
        assert (shown["status"], shown["text"]) == ("finished", TEXT + " It")
    alone = gateway.call("POST", "/v1/requests", {"prompt": "France"}).body
    assert "samples" not in alone
