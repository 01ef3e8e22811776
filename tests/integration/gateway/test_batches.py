"""/v1/batches with the `openai` client: every state, each line once, whatever is killed meanwhile."""

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from relay.request import BATCH_PRIORITY, Finish, Token
from relay.rooms import Rooms
from tests.batch_rig import ProcessorProcess, as_file, chat_lines, results
from tests.gateway_rig import (
    Answering,
    GatewayProcess,
    ScriptedWorker,
    eventually,
    scraped,
)
from tests.samples import value_of
from tests.servers import RedisServer

MODEL = f"batches-{secrets.token_hex(4)}"
ENDPOINT: Any = "/v1/completions"
OPEN_LINES = 8
TEXT = " one two"


@pytest.fixture(scope="module")
def env(valkey: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("batches")
    return {
        "REDIS_URL": valkey.url,
        "SERVED_NAME": MODEL,
        "FILES_URL": str(folder / "files"),
        "BATCH_OPEN_LINES": str(OPEN_LINES),
        "LOG": str(folder),
    }


@pytest.fixture(scope="module")
def gateway(valkey: RedisServer, env: dict[str, str]) -> Iterator[GatewayProcess]:
    with GatewayProcess(valkey.url, MODEL, Path(env["LOG"]) / "gateway", **env) as process:
        yield process


@pytest.fixture(scope="module")
def processor(env: dict[str, str]) -> Iterator[ProcessorProcess]:
    with ProcessorProcess(Path(env["LOG"]) / "processor", **env) as process:
        yield process


def upload(client: openai.OpenAI, content: bytes) -> str:
    return client.files.create(file=("lines.jsonl", content), purpose="batch").id


def start(client: openai.OpenAI, content: bytes, window: str = "24h", **more: Any) -> Batch:
    wanted: Any = window
    return client.batches.create(
        input_file_id=upload(client, content), endpoint=ENDPOINT, completion_window=wanted, **more
    )


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    final = ("completed", "failed", "expired", "cancelled")
    eventually(lambda: client.batches.retrieve(batch.id).status in final, f"{batch.id} ends")
    return client.batches.retrieve(batch.id)


def content(client: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    return results(client.files.content(file_id).read()) if file_id else {}


def test_a_batch_from_file_to_results(
    client: openai.OpenAI,
    processor: ProcessorProcess,
    answering: Answering,
    spoken: list[Token],
    rooms: Rooms,
) -> None:
    lines = list(chat_lines(20))
    lines[3]["body"]["temperature"] = 7
    lines[4]["body"]["prompt"] = json.loads("[" * 900 + "]" * 900)
    lines[5]["body"]["prompt"] = "\ud800"
    batch = start(client, as_file(lines), metadata={"job": "nightly"})
    assert (batch.status, batch.endpoint, batch.metadata) == ("validating", ENDPOINT, {"job": "nightly"})
    assert batch.expires_at == batch.created_at + 86_400
    batch = ended(client, batch)
    assert batch.status == "completed"
    assert batch.request_counts
    assert batch.request_counts.to_dict() == {"total": 20, "completed": 17, "failed": 3}
    assert batch.created_at <= (batch.in_progress_at or 0) <= (batch.finalizing_at or 0)
    assert (batch.finalizing_at or 0) <= (batch.completed_at or 0)
    output, errors = content(client, batch.output_file_id), content(client, batch.error_file_id)
    assert output.keys() | errors.keys() == {line["custom_id"] for line in lines}
    assert errors.keys() == {"line-3", "line-4", "line-5"}
    refused = errors["line-3"]["response"]
    assert (refused["status_code"], refused["body"]["error"]["param"]) == (400, "temperature")
    reply = output["line-0"]["response"]
    assert reply["status_code"] == 200
    assert reply["request_id"]
    assert reply["body"]["object"] == "text_completion"
    assert reply["body"]["choices"][0]["text"] == " one two"
    assert batch.usage
    assert batch.usage.output_tokens == 17 * len(spoken)
    assert batch.usage.input_tokens == sum(
        each["response"]["body"]["usage"]["prompt_tokens"] for each in output.values()
    )
    assert {claimed.hold.request_id for claimed in answering.claimed} == {
        each["response"]["body"]["id"].removeprefix("cmpl-") for each in output.values()
    }
    assert batch.id in [each.id for each in client.batches.list(limit=1)]
    ttls: list[Any] = [rooms.redis.ttl(f"{rooms.root}:req:{c.hold.request_id}") for c in answering.claimed]
    assert max(ttls) <= 600, "a night's answers would fill Redis"
    file = client.files.retrieve(batch.output_file_id or "")
    assert file.purpose == "batch_output"


def test_only_wrong_lines_fail_a_batch(client: openai.OpenAI, processor: ProcessorProcess) -> None:
    good, other = as_file(chat_lines(1)), as_file(chat_lines(2))
    batch = ended(client, start(client, good + b"{\n" + other))
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.errors
    assert batch.errors.data
    found = [(error.code, error.line, error.param) for error in batch.errors.data]
    assert found == [("invalid_json_line", 2, None), ("duplicate_custom_id", 3, "custom_id")]
    assert batch.failed_at


def test_lines_wait_while_nobody_can_serve_them(
    client: openai.OpenAI, processor: ProcessorProcess, rooms: Rooms, spoken: list[Token]
) -> None:
    batch = start(client, as_file(chat_lines(3)))
    eventually(lambda: client.batches.retrieve(batch.id).status == "in_progress", "it starts")
    with ScriptedWorker(rooms) as worker, Answering(worker, spoken, Finish("stop")).running():
        assert ended(client, batch).status == "completed"


def test_a_cancelled_batch_keeps_what_was_finished(
    client: openai.OpenAI,
    processor: ProcessorProcess,
    worker: ScriptedWorker,
    rooms: Rooms,
    spoken: list[Token],
) -> None:
    batch = start(client, as_file(chat_lines(30)))
    claimed = worker.claim()
    worker.emit(claimed, spoken)
    worker.emit(claimed, [], Finish("stop"), start=len(spoken))
    eventually(lambda: client.batches.retrieve(batch.id).request_counts.completed == 1, "one line is done")  # type: ignore[union-attr]
    held = worker.claim().hold.request_id
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch)
    assert (batch.status, bool(batch.cancelled_at)) == ("cancelled", True)
    assert rooms.record(held).state == "cancelled"  # type: ignore[union-attr]
    output, errors = content(client, batch.output_file_id), content(client, batch.error_file_id)
    assert (len(output), len(errors)) == (1, 29)
    assert not output.keys() & errors.keys()
    assert {each["error"]["code"] for each in errors.values()} == {"batch_cancelled"}
    assert client.batches.cancel(batch.id).status == "cancelled", "a repeat is answered alike"
    assert all(record.state.terminal for record in rooms.list_requests(100))


def test_an_expired_batch_keeps_what_was_finished(
    client: openai.OpenAI, processor: ProcessorProcess, worker: ScriptedWorker, spoken: list[Token]
) -> None:
    batch = start(client, as_file(chat_lines(12)), window="4s")
    claimed = worker.claim()
    worker.emit(claimed, spoken)
    worker.emit(claimed, [], Finish("stop"), start=len(spoken))
    batch = ended(client, batch)
    assert (batch.status, bool(batch.expired_at)) == ("expired", True)
    output, errors = content(client, batch.output_file_id), content(client, batch.error_file_id)
    assert (len(output), len(errors)) == (1, 11)
    assert {each["error"]["code"] for each in errors.values()} == {"batch_expired"}
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_lines_are_few_at_a_time_and_others_overtake_them(
    client: openai.OpenAI,
    processor: ProcessorProcess,
    worker: ScriptedWorker,
    rooms: Rooms,
    gateway: GatewayProcess,
) -> None:
    batch = start(client, as_file(chat_lines(50)))
    eventually(lambda: len(_open(rooms)) == OPEN_LINES, "the first lines are submitted")
    cluster = scraped(gateway, "/metrics/cluster")
    assert value_of(cluster, "kvrelay_open_batches", status="in_progress") == 1
    assert value_of(cluster, "kvrelay_batch_lines_left") == 50
    mine = gateway.call("POST", "/v1/requests", {"prompt": "now", "max_tokens": 1}).body["id"]
    assert worker.claim().hold.request_id == mine
    assert len(_open(rooms)) == OPEN_LINES + 1, "no line more"
    client.batches.cancel(batch.id)
    ended(client, batch)


def _open(rooms: Rooms) -> list[str]:
    return [record.request_id for record in rooms.list_requests(200) if not record.state.terminal]


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/responses"])
def test_other_endpoints(
    client: openai.OpenAI, processor: ProcessorProcess, answering: Answering, endpoint: Any
) -> None:
    said: Any = {"messages": [{"role": "user", "content": "x"}]} if "chat" in endpoint else {"input": "x"}
    lines = [{"custom_id": str(i), "method": "POST", "url": endpoint, "body": said} for i in range(3)]
    batch = client.batches.create(
        input_file_id=upload(client, as_file(lines)), endpoint=endpoint, completion_window="24h"
    )
    batch = ended(client, batch)
    output = content(client, batch.output_file_id)
    assert (batch.status, len(output)) == ("completed", 3)
    assert "one two" in json.dumps(output["0"]["response"]["body"])
    assert batch.usage
    assert batch.usage.output_tokens > 0


def test_several_processors_share_the_work(
    client: openai.OpenAI, processor: ProcessorProcess, env: dict[str, str], answering: Answering
) -> None:
    with ProcessorProcess(Path(env["LOG"]) / "second", **env):
        batches = [start(client, as_file(chat_lines(40))) for _ in range(4)]
        for batch in batches:
            batch = ended(client, batch)
            assert batch.status == "completed"
            assert len(content(client, batch.output_file_id)) == 40
    assert len(answering.claimed) == 160


def test_a_key_makes_one_batch(client: openai.OpenAI, processor: ProcessorProcess) -> None:
    file_id = upload(client, b"{")
    body: Any = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
    first, again = [
        client.batches.create(**body, extra_headers={"Idempotency-Key": "night"}) for _ in range(2)
    ]
    assert first.id == again.id
    with pytest.raises(openai.ConflictError):
        client.batches.create(
            **body | {"completion_window": "12h"}, extra_headers={"Idempotency-Key": "night"}
        )
    ended(client, first)


def test_what_is_refused(client: openai.OpenAI, processor: ProcessorProcess) -> None:
    file_id = upload(client, b"{")
    good: Any = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
    for wrong in (
        {"endpoint": "/v1/embeddings"},
        {"completion_window": "1y"},
        {"completion_window": "15d"},
        {"metadata": {"k": 1}},
        {"metadata": {str(i): "" for i in range(17)}},
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.batches.create(**good | wrong)
        assert caught.value.param
        assert caught.value.param.split(".")[0] == next(iter(wrong))
    with pytest.raises(openai.NotFoundError):
        client.batches.create(**good | {"input_file_id": "file-" + "0" * 32})
    for unknown in ("batch_" + "0" * 32, "batch_x"):
        with pytest.raises(openai.NotFoundError):
            client.batches.retrieve(unknown)


def test_the_input_stays_while_a_batch_reads_it(client: openai.OpenAI, processor: ProcessorProcess) -> None:
    batch = start(client, as_file(chat_lines(1)))
    with pytest.raises(openai.ConflictError):
        client.files.delete(batch.input_file_id)
    client.batches.cancel(batch.id)
    ended(client, batch)
    assert client.files.delete(batch.input_file_id).deleted


def test_a_stopped_processor_hands_over(
    client: openai.OpenAI, env: dict[str, str], valkey: RedisServer, tmp_path: Path, spoken: list[Token]
) -> None:
    """SIGTERM in mid-batch: another goes on at once, and no request is made twice."""
    model = f"handed-{secrets.token_hex(4)}"
    own = env | {"LEASE_MS": "60000"} | {"SERVED_NAME": model, "FILES_URL": str(tmp_path / "files")}
    rooms = Rooms(valkey.url, model)
    with (
        GatewayProcess(valkey.url, model, tmp_path / "gateway", **own) as gateway,
        ScriptedWorker(rooms) as worker,
    ):
        client = client.with_options(base_url=f"{gateway.url}/v1")
        batch = start(client, as_file(chat_lines(OPEN_LINES)))
        with ProcessorProcess(tmp_path / "first", **own) as first:
            claims = [worker.claim() for _ in range(OPEN_LINES)]
            assert first.stop() == 0
        with ProcessorProcess(tmp_path / "second", **own) as second:
            eventually(lambda: "batch_claimed" in second.said(), "the second goes on")
            for claimed in claims:
                worker.emit(claimed, spoken, Finish("stop"))
            batch = ended(client, batch)
        assert batch.request_counts
        assert batch.request_counts.to_dict() == {"total": OPEN_LINES, "completed": OPEN_LINES, "failed": 0}
        assert len(content(client, batch.output_file_id)) == OPEN_LINES
        assert len(rooms.list_requests(100)) == OPEN_LINES
        redis: Any = rooms.redis
        priority = redis.hget(f"{rooms.root}:req:{claims[0].hold.request_id}", "priority")
        assert json.loads(priority) == BATCH_PRIORITY
    rooms.close()
