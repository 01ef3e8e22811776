"""/v1/requests over real HTTP and a real Valkey: submit, poll, stream, resume, cancel, list, idempotency."""

import secrets
import threading
import time
from typing import Any

import pytest

from relay.answers import Prefilled, Transfer
from relay.request import Claimed, Finish, Leg, State, Token, Why
from relay.rooms import Rooms
from relay.routing import queue_of
from relay.stamps import Stamps
from relay.stretches import Stretch
from relay.tokenizer import Tokenizer
from tests.gateway_rig import (
    LOAD,
    EventStream,
    GatewayProcess,
    Reply,
    ScriptedWorker,
    scraped,
    wait_for_followers,
    words,
)
from tests.integration.until import until
from tests.samples import value_of
from tests.servers import RedisServer

MODEL = f"gateway-{secrets.token_hex(4)}"
PROMPT = {"prompt": "Once upon a time", "max_tokens": 50}
GATEWAY = {"MAX_OPEN_REQUESTS": "3", "REQUEST_TIMEOUT_S": "100"}
STORY = " there was a small red fox who liked to read."


@pytest.fixture
def story(tokenizer: Tokenizer) -> list[Token]:
    return words(tokenizer, STORY)


def submit(gateway: GatewayProcess, body: Any = None, **headers: str) -> str:
    reply = gateway.call("POST", "/v1/requests", body or PROMPT, **headers)
    assert reply.status == 202, reply.raw
    return str(reply.body["id"])


def finished(gateway: GatewayProcess, worker: ScriptedWorker, story: list[Token], **body: Any) -> str:
    request_id = submit(gateway, PROMPT | body)
    worker.emit(worker.claim(request_id=request_id), story, Finish("stop", "fox", " The end"))
    return request_id


def deadline_ms(rooms: Rooms, request_id: str) -> float:
    """How long after its submission the request may end."""
    redis: Any = rooms.redis
    submitted, deadline = redis.hmget(f"{rooms.root}:req:{request_id}", "submitted", "deadline")
    return round(float(deadline) - float(submitted))


def test_the_smaller_of_field_header_and_setting_is_the_timeout(
    gateway: GatewayProcess, worker: ScriptedWorker, rooms: Rooms
) -> None:
    for field, header, ms in (
        (20, "30.5", 20_000),
        (20, "1.5", 1_500),
        (None, "7", 7_000),
        (None, "1000", 100_000),
    ):
        request_id = submit(gateway, PROMPT | {"timeout": field}, X_Request_Timeout=header)
        assert deadline_ms(rooms, request_id) == ms
        rooms.cancel(request_id)
    for header in ("0", "-1", "soon", "1e3", ""):
        reply = gateway.call("POST", "/v1/requests", PROMPT, X_Request_Timeout=header)
        assert shape_of_error(reply) == (400, "invalid_value")
        assert reply.body["error"]["param"] == "X-Request-Timeout"


def test_what_cannot_be_in_time_is_refused_before_it_is_accepted(
    gateway: GatewayProcess, worker: ScriptedWorker, rooms: Rooms
) -> None:
    submit(gateway)
    redis: Any = rooms.redis
    redis.hset(f"{rooms.root}:pace", mapping={"claims": 2, "ms": 60_000})  # one claim in 30 s
    try:
        reply = gateway.call("POST", "/v1/requests", PROMPT, X_Request_Timeout="7.5")
        assert shape_of_error(reply) == (429, "deadline_unreachable")
        assert reply.headers["Retry-After"] == "23"
        assert gateway.call("POST", "/v1/requests", PROMPT, X_Request_Timeout="31").status == 202
    finally:
        redis.delete(f"{rooms.root}:pace")


def follow(gateway: GatewayProcess, request_id: str, **headers: str) -> EventStream:
    return gateway.stream("GET", f"/v1/requests/{request_id}/stream", **headers)


def shape_of_error(reply: Reply) -> tuple[int, str]:
    error = reply.body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return reply.status, error["code"]


def test_a_submit_is_recorded_and_rung_before_it_is_answered(
    gateway: GatewayProcess, worker: ScriptedWorker, tokenizer: Tokenizer, valkey: RedisServer
) -> None:
    body = {
        "prompt": "Once upon a time",
        "max_tokens": 7,
        "temperature": 0.5,
        "seed": -3,
        "stop": "x",
        "top_k": -1,
    }
    reply = gateway.call("POST", "/v1/requests", body, X_Request_Id="trace-1")
    request_id = reply.body["id"]
    assert reply.status == 202
    assert reply.headers["Location"] == f"/v1/requests/{request_id}"
    assert reply.headers["X-Request-Id"] == "trace-1"
    assert reply.body["links"]["stream"] == f"/v1/requests/{request_id}/stream"
    rung = valkey.client().lrange(queue_of(Leg.PREFILL, MODEL), 0, 0)
    assert request_id.encode() in rung[0]
    claimed = worker.claim()
    assert claimed.hold.request_id == request_id
    assert list(claimed.prompt_ids) == tokenizer.encode("Once upon a time")
    params = claimed.params
    assert (params.max_tokens, params.temperature, params.stop, params.top_k) == (7, 0.5, ("x",), 0)
    assert params.seed == -3 % (1 << 63)


def test_a_request_id_that_is_no_plain_word_is_replaced(gateway: GatewayProcess) -> None:
    for trace in ("two words", "x" * 129, ""):
        echoed = gateway.call("GET", "/health", X_Request_Id=trace).headers["X-Request-Id"]
        assert echoed != trace
        assert len(echoed) == 32


def test_messages_and_token_ids_are_prompts_too(
    gateway: GatewayProcess, worker: ScriptedWorker, tokenizer: Tokenizer
) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    submit(gateway, {"messages": messages})
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    claimed = worker.claim()
    assert list(claimed.prompt_ids) == tokenizer.encode(rendered, add_special_tokens=False)
    # Without a limit the output may fill the pool, which is smaller than the context.
    assert claimed.params.max_tokens == 4096 - len(claimed.prompt_ids)
    submit(gateway, {"prompt": [[5, 6, 7]]})
    assert worker.claim().prompt_ids == (5, 6, 7)


def test_seeds_differ_unless_the_client_sends_one(gateway: GatewayProcess, worker: ScriptedWorker) -> None:
    seeds = []
    for _ in range(2):
        submit(gateway)
        seeds.append(worker.claim().params.seed)
    assert seeds[0] != seeds[1]


def test_poll_tells_everything_once_the_request_has_finished(
    gateway: GatewayProcess, worker: ScriptedWorker, story: list[Token]
) -> None:
    request_id = finished(gateway, worker, story)
    view = gateway.call("GET", f"/v1/requests/{request_id}?token_ids=1").body
    assert (view["status"], view["finish_reason"], view["stop_reason"]) == ("finished", "stop", "fox")
    assert view["text"] == STORY + " The end"
    assert view["token_ids"] == [token.token_id for token in story]
    assert view["position"] == len(story)
    assert view["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": len(story),
        "total_tokens": 4 + len(story),
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    ledger = view["ledger"]
    assert (ledger["attempts"], ledger["retractions"], ledger["transfer"]) == (1, 0, None)
    assert ledger["prefill"] == pytest.approx(10.0, abs=0.01)
    assert ledger["total"] >= ledger["queued"] >= 0
    assert "logprobs" not in view
    assert view["error"] is None


def test_the_ledger_of_a_relayed_request(gateway: GatewayProcess, rooms: Rooms, story: list[Token]) -> None:
    with ScriptedWorker(rooms, "prefill") as prefill, ScriptedWorker(rooms, "decode") as decode:
        request_id = submit(gateway)
        p = prefill.claim(Leg.PREFILL)
        d = decode.claim(Leg.DECODE)
        assert rooms.publish(d.hold, p.room, [1, 2], 0).ok
        begun = p.clock.server_ms
        stamps = Stamps(
            2, begun + 1, (Stretch(begun, begun + 5, 3),), (Stretch(begun + 5, begun + 6, 4096, 0, 6),)
        )
        assert rooms.kv_ready(p.hold, p.room, Prefilled(stamps), Transfer(1500, 4096, 2, 8192)).ok
        decode.emit(d, story, Finish("length"))
        ledger = gateway.call("GET", f"/v1/requests/{request_id}?wait=5").body["ledger"]
        timeline = gateway.call("GET", f"/v1/requests/{request_id}/timeline").body
    assert (timeline["status"], timeline["attempts"]) == ("finished", 1)
    spans = {span["name"]: span for span in timeline["spans"]}
    assert set(spans) == {
        *("accept", "queued", "bootstrap", "reserve", "wait", "prefill", "chunk", "transfer", "send"),
        *("admit", "decode"),
    }
    assert all(0 <= span["start_ms"] <= span["end_ms"] <= timeline["now_ms"] for span in spans.values())
    assert timeline["spans"][spans["send"]["parent"]]["name"] == "transfer"
    assert spans["decode"]["attributes"] == {"tokens": len(story)}
    transfer = {"exposed_ms": 1.5, "bytes": 4096, "spared_bytes": 8192, "descriptors": 2}
    assert ledger["transfer"] == transfer
    assert ledger["prefill"] == pytest.approx(5.0, abs=0.01)
    assert all(ledger[span] >= 0 for span in ("queued", "bootstrap", "admit", "decode", "total"))


def test_a_poll_waits_for_the_end(
    gateway: GatewayProcess, worker: ScriptedWorker, story: list[Token]
) -> None:
    request_id = submit(gateway)
    claimed = worker.claim()
    connection = gateway.open("GET", f"/v1/requests/{request_id}?wait=20")
    worker.emit(claimed, story[:3])
    connection.sock.settimeout(0.3)
    with pytest.raises(TimeoutError):
        connection.sock.recv(1)
    connection.close()
    waited: list[Reply] = []
    thread = threading.Thread(
        target=lambda: waited.append(gateway.call("GET", f"/v1/requests/{request_id}?wait=20"))
    )
    thread.start()
    worker.emit(claimed, story[3:], Finish("length"))
    thread.join()
    assert waited[0].body["text"] == STORY


def test_a_poll_with_after_waits_for_the_next_token_only(
    gateway: GatewayProcess, worker: ScriptedWorker, story: list[Token]
) -> None:
    request_id = submit(gateway)
    claimed = worker.claim()
    worker.emit(claimed, story[:3])
    view = gateway.call("GET", f"/v1/requests/{request_id}?wait=20&after=1").body
    assert (view["position"], view["text"]) == (3, story[1].text + story[2].text)
    timer = threading.Timer(0.1, worker.emit, (claimed, story[3:4]))
    timer.start()
    view = gateway.call("GET", f"/v1/requests/{request_id}?wait=20&after=3").body
    timer.join()
    assert (view["status"], view["position"], view["text"]) == ("decode", 4, story[3].text)


def test_a_poll_gives_up_after_its_wait(gateway: GatewayProcess, worker: ScriptedWorker) -> None:
    request_id = submit(gateway)
    began = time.monotonic()
    view = gateway.call("GET", f"/v1/requests/{request_id}?wait=0.4").body
    assert view["status"] == "queued"
    assert time.monotonic() - began >= 0.4


def test_a_stream_has_every_token_once_and_the_end(
    gateway: GatewayProcess, worker: ScriptedWorker, story: list[Token]
) -> None:
    request_id = submit(gateway)
    stream = follow(gateway, request_id)
    assert stream.headers["Content-Type"].startswith("text/event-stream")
    claimed = worker.claim()
    seen = []
    for token in story:
        worker.emit(claimed, [token])
        seen += stream.events(1)  # each token is sent when it comes, not with the next
    worker.emit(claimed, [], Finish("stop", 2, "!"), start=len(story))
    (end,) = stream.events()
    assert [event.event_id for event in seen] == [token.position + 1 for token in story]
    assert [event.data["token"] for event in seen] == [token.token_id for token in story]
    assert "".join(event.data["text"] for event in seen) == STORY
    assert end.name == "end"
    assert (end.data["status"], end.data["text"], end.data["stop_reason"]) == ("finished", "!", 2)
    assert end.data["usage"]["completion_tokens"] == len(story)


def test_a_stream_resumes_exactly_after_the_last_event(
    gateway: GatewayProcess, worker: ScriptedWorker, story: list[Token]
) -> None:
    request_id = submit(gateway)
    claimed = worker.claim()
    worker.emit(claimed, story[:4])
    first = follow(gateway, request_id)
    last = first.events(2)[-1].event_id
    first.close()
    second = follow(gateway, request_id, Last_Event_ID=str(last))
    worker.emit(claimed, story[4:], Finish("stop"))
    *tokens, end = second.events()
    assert [event.data["position"] for event in tokens] == list(range(2, len(story)))
    assert end.name == "end"
    only_end = follow(gateway, request_id, Last_Event_ID=str(len(story))).events()
    assert [event.name for event in only_end] == ["end"]


def test_an_ended_request_is_replayed_at_once(
    gateway: GatewayProcess, worker: ScriptedWorker, story: list[Token]
) -> None:
    request_id = finished(gateway, worker, story)
    events = follow(gateway, request_id).events()
    assert "".join(event.data["text"] for event in events) == STORY + " The end"


def test_many_followers_of_one_request_see_the_same(
    gateway: GatewayProcess, worker: ScriptedWorker, story: list[Token]
) -> None:
    request_id = submit(gateway)
    claimed = worker.claim()
    streams = []
    for token in story[:8]:
        streams.append(follow(gateway, request_id))
        worker.emit(claimed, [token])
    worker.emit(claimed, story[8:], Finish("stop"))
    for stream in streams:
        assert [e.data["token"] for e in stream.events() if e.name != "end"] == [t.token_id for t in story]


@pytest.mark.parametrize("position", ["-1", "x", "1.5", "99999999999", "١"])
def test_a_last_event_id_that_is_none(gateway: GatewayProcess, worker: ScriptedWorker, position: str) -> None:
    request_id = submit(gateway)
    path = f"/v1/requests/{request_id}/stream"
    encoded = position.encode().decode("latin-1")
    assert shape_of_error(gateway.call("GET", path, Last_Event_ID=encoded)) == (400, "invalid_value")


def test_a_last_event_id_past_the_stream(gateway: GatewayProcess, worker: ScriptedWorker) -> None:
    request_id = submit(gateway)
    reply = gateway.call("GET", f"/v1/requests/{request_id}/stream", Last_Event_ID="5")
    assert shape_of_error(reply) == (409, "position_ahead")


def test_a_stream_whose_client_leaves_does_not_cancel(
    gateway: GatewayProcess, worker: ScriptedWorker, rooms: Rooms, story: list[Token]
) -> None:
    request_id = submit(gateway)
    claimed = worker.claim()
    stream = follow(gateway, request_id)
    worker.emit(claimed, story[:1])
    stream.events(1)
    stream.close()
    wait_for_followers(gateway, 0)
    record = rooms.record(request_id)
    assert record
    assert record.state is State.DECODE


def test_cancel_is_idempotent_and_ends_streams(
    gateway: GatewayProcess, worker: ScriptedWorker, story: list[Token]
) -> None:
    request_id = submit(gateway)
    worker.emit(worker.claim(), story[:2])
    stream = follow(gateway, request_id)
    assert len(stream.events(2)) == 2
    for _ in range(2):
        reply = gateway.call("DELETE", f"/v1/requests/{request_id}")
        assert (reply.status, reply.body["status"]) == (200, "cancelled")
    (end,) = stream.events()
    assert (end.name, end.data["status"]) == ("end", "cancelled")


def test_a_failure_is_told_in_poll_and_stream(
    gateway: GatewayProcess, worker: ScriptedWorker, rooms: Rooms
) -> None:
    request_id = submit(gateway)
    claimed = worker.claim()
    stream = follow(gateway, request_id)
    assert rooms.fail(claimed.hold, "bad_prompt", "It cannot be computed.").ok
    (end,) = stream.events()
    error = {"code": "bad_prompt", "message": "It cannot be computed."}
    assert (end.data["status"], end.data["error"]) == ("failed", error)
    assert gateway.call("GET", f"/v1/requests/{request_id}").body["error"] == error


def test_unknown_requests(gateway: GatewayProcess) -> None:
    for method, path in [
        ("GET", "/v1/requests/req-0"),
        ("GET", "/v1/requests/req-0/stream"),
        ("DELETE", "/v1/requests/req-0"),
        ("GET", "/v1/requests/a%20b%7B%7D"),
        ("GET", "/v1/requests?before=req-0"),
    ]:
        assert shape_of_error(gateway.call(method, path)) == (404, "request_not_found")


def test_the_list_goes_back_page_by_page(
    gateway: GatewayProcess, worker: ScriptedWorker, rooms: Rooms
) -> None:
    made = []
    for _ in range(3):
        made.append(submit(gateway))
        rooms.cancel(made[-1])
    first = gateway.call("GET", "/v1/requests?limit=2").body
    assert [each["id"] for each in first["data"]] == [made[2], made[1]]
    assert first["before"] == made[1]
    second = gateway.call("GET", f"/v1/requests?limit=1&before={made[1]}").body
    assert [each["id"] for each in second["data"]] == [made[0]]


def test_an_idempotency_key_is_one_request(
    gateway: GatewayProcess, worker: ScriptedWorker, rooms: Rooms
) -> None:
    key = secrets.token_hex(8)
    first = gateway.call("POST", "/v1/requests", PROMPT, Idempotency_Key=key)
    claimed = worker.claim()
    again = gateway.call("POST", "/v1/requests", PROMPT | {"seed": None}, Idempotency_Key=key)
    assert (first.status, again.status) == (202, 202)
    assert first.raw == again.raw
    assert first.headers["Idempotency-Replayed"] is None
    assert again.headers["Idempotency-Replayed"] == "true"
    assert claimed.hold.request_id == first.body["id"]
    other = gateway.call("POST", "/v1/requests", PROMPT | {"max_tokens": 3}, Idempotency_Key=key)
    assert shape_of_error(other) == (409, "idempotency_conflict")
    assert [r.request_id for r in rooms.list_requests(1)] == [first.body["id"]]


def test_a_replay_is_answered_even_when_nobody_could_serve_it_now(
    gateway: GatewayProcess, rooms: Rooms
) -> None:
    key = secrets.token_hex(8)
    with ScriptedWorker(rooms):
        first = gateway.call("POST", "/v1/requests", PROMPT, Idempotency_Key=key)
    again = gateway.call("POST", "/v1/requests", PROMPT, Idempotency_Key=key)
    assert (again.status, again.raw) == (202, first.raw)
    other = gateway.call("POST", "/v1/requests", PROMPT | {"seed": 1}, Idempotency_Key=key)
    assert shape_of_error(other) == (409, "idempotency_conflict")


def test_a_key_whose_result_has_expired_is_told_so(
    gateway: GatewayProcess, worker: ScriptedWorker, rooms: Rooms
) -> None:
    """Not that Redis lost the request: to send it again would never help."""
    key = secrets.token_hex(8)
    request_id = gateway.call("POST", "/v1/requests", PROMPT, Idempotency_Key=key).body["id"]
    rooms.cancel(request_id)
    rooms.redis.delete(f"{rooms.root}:req:{request_id}")
    again = gateway.call("POST", "/v1/requests", PROMPT, Idempotency_Key=key)
    assert shape_of_error(again) == (410, "result_expired")


def test_streams_leave_threads_for_short_calls(gateway: GatewayProcess, worker: ScriptedWorker) -> None:
    request_id = submit(gateway)
    path = f"/v1/requests/{request_id}"
    streams = [follow(gateway, request_id) for _ in range(22)]
    for refused in (
        gateway.call("GET", f"{path}/stream"),
        gateway.call("GET", f"{path}?wait=1"),
        gateway.call("POST", "/v1/completions", PROMPT),
    ):
        assert shape_of_error(refused) == (503, "too_many_streams")
    assert gateway.call("GET", "/health").status == 200
    assert gateway.call("DELETE", path).status == 200
    assert all(stream.events()[-1].name == "end" for stream in streams)


def test_two_submits_at_once_with_one_key_are_one_request(
    gateway: GatewayProcess, worker: ScriptedWorker
) -> None:
    key, replies = secrets.token_hex(8), []
    threads = [
        threading.Thread(
            target=lambda: replies.append(gateway.call("POST", "/v1/requests", PROMPT, Idempotency_Key=key))
        )
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [reply.status for reply in replies] == [202] * 6
    assert len({reply.body["id"] for reply in replies}) == 1


def test_full_answers_429(gateway: GatewayProcess, worker: ScriptedWorker, rooms: Rooms) -> None:
    for _ in range(3):
        submit(gateway)
    reply = gateway.call("POST", "/v1/requests", PROMPT)
    assert shape_of_error(reply) == (429, "too_many_requests")
    assert int(reply.headers["Retry-After"]) >= 1
    assert len([r for r in rooms.list_requests(1000) if not r.state.terminal]) == 3


def test_ready_says_what_is_missing(gateway: GatewayProcess, rooms: Rooms) -> None:
    def is_ready(*missing: str) -> None:
        """Soon: the verdict may be a look old."""

        def asked() -> Reply | None:
            reply = gateway.call("GET", "/ready")
            return reply if reply.body["missing"] == list(missing) else None

        reply = until(asked, f"missing: {missing}")
        assert reply
        assert reply.status == (503 if missing else 200)
        assert 0 <= reply.body["age_ms"] <= 2_000

    is_ready("prefill worker", "decode worker")
    with ScriptedWorker(rooms, "prefill"):
        is_ready("decode worker")
        reply = gateway.call("POST", "/v1/requests", PROMPT)
        assert shape_of_error(reply) == (503, "no_workers")
        assert int(reply.headers["Retry-After"]) >= 1
        with ScriptedWorker(rooms, "decode"):
            is_ready()
    with ScriptedWorker(rooms, "unified"):
        is_ready()


def test_what_no_living_pool_can_hold_is_refused(gateway: GatewayProcess, rooms: Rooms) -> None:
    """A prefill worker must hold the output too: a later attempt prefills prompt and stream."""
    with ScriptedWorker(rooms, "prefill", 96), ScriptedWorker(rooms, "decode", 128):
        fits = gateway.call("POST", "/v1/requests", {"prompt": [1] * 63, "max_tokens": 33})
        assert fits.status == 202
        for prompt, output in ((96, 1), (63, 34)):
            reply = gateway.call("POST", "/v1/requests", {"prompt": [1] * prompt, "max_tokens": output})
            assert shape_of_error(reply) == (400, "exceeds_kv_capacity")


def test_metrics_show_workers_queues_and_counts(gateway: GatewayProcess, worker: ScriptedWorker) -> None:
    submit(gateway)
    cluster = scraped(gateway, "/metrics/cluster")
    for name, value, labels in (
        ("kvrelay_queue_length", 1, {"leg": "prefill", "kind": "client"}),
        ("kvrelay_queue_length", 0, {"leg": "prefill", "kind": "batch"}),
        ("kvrelay_workers", 1, {"role": "unified"}),
        ("kvrelay_worker_pages", LOAD.free_pages, {"worker": "unified@test", "state": "free"}),
        ("kvrelay_redis_up", 1, {}),
    ):
        assert value_of(cluster, name, **labels) == value
    own = scraped(gateway, "/metrics")
    assert value_of(own, "kvrelay_requests_total", kind="request", outcome="accepted") >= 1
    assert len({sample.labels["model_name"] for sample in own + cluster}) == 1
    assert not {sample.name for sample in own} & {sample.name for sample in cluster}, "nothing is told twice"
    assert gateway.call("GET", "/metrics/targets").body == [
        {
            "targets": ["10.0.0.1:9400"],
            "labels": {"__meta_kvrelay_role": "unified", "__meta_kvrelay_worker": "unified@test"},
        }
    ]


def test_a_claim_after_a_retraction_continues_the_stream(
    gateway: GatewayProcess, worker: ScriptedWorker, rooms: Rooms, story: list[Token]
) -> None:
    request_id = submit(gateway)
    stream = follow(gateway, request_id)
    claimed: Claimed = worker.claim()
    worker.emit(claimed, story[:3])
    assert rooms.release(claimed.hold, Why.RETRACT).ok
    again = worker.claim()
    assert list(again.emitted) == [token.token_id for token in story[:3]]
    worker.emit(again, story[3:], Finish("stop"))
    *tokens, _ = stream.events()
    assert [event.data["token"] for event in tokens] == [token.token_id for token in story]
    assert gateway.call("GET", f"/v1/requests/{request_id}").body["ledger"]["retractions"] == 1


def test_a_request_may_be_named_in_its_body(
    gateway: GatewayProcess, rooms: Rooms, worker: ScriptedWorker
) -> None:
    body = {"prompt": "x", "request_id": "trace-2"}
    reply = gateway.call("POST", "/v1/requests", body, X_Request_Id="trace-1")
    assert (reply.status, reply.headers["X-Request-Id"]) == (202, "trace-2")
    rooms.cancel(reply.body["id"])
