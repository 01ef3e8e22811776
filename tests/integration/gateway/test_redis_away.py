"""Redis goes away and comes back, whole, rolled back or empty, while clients follow their streams."""

import secrets
import shutil
import time
from collections.abc import Iterator

import pytest
from redis.exceptions import RedisError

from relay.request import Claimed, Finish, Token
from relay.rooms import Rooms
from tests.gateway_rig import (
    EventStream,
    GatewayProcess,
    ScriptedWorker,
    default_tokenizer,
    eventually,
    scraped,
    wait_for_followers,
    words,
)
from tests.servers import RedisServer, valkey_binary

MODEL = f"away-{secrets.token_hex(4)}"
TELLING = " a story that is told twice must not change on the way"


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(valkey_binary(), tmp_path_factory.mktemp("valkey") / "data", "always") as server:
        yield server


@pytest.fixture
def server(valkey: RedisServer) -> RedisServer:
    """Of this file alone: its tests take it away."""
    return valkey


@pytest.fixture(scope="module")
def story() -> list[Token]:
    return words(default_tokenizer(), TELLING)


def begin(gateway: GatewayProcess, worker: ScriptedWorker) -> tuple[Claimed, EventStream]:
    reply = gateway.call("POST", "/v1/requests", {"prompt": "Once"})
    assert reply.status == 202, reply.raw
    stream = gateway.stream("GET", reply.body["links"]["stream"])
    return worker.claim(request_id=reply.body["id"]), stream


def emit_when_back(
    worker: ScriptedWorker, claimed: Claimed, tokens: list[Token], finish: Finish | None = None
) -> None:
    """As a worker does: try again until Redis answers."""
    deadline = time.monotonic() + 20
    while True:
        try:
            worker.emit(claimed, tokens, finish)
            return
        except RedisError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def ready(gateway: GatewayProcess) -> bool:
    return gateway.call("GET", "/ready").status == 200


def test_a_stream_goes_on_when_redis_is_back(
    gateway: GatewayProcess, worker: ScriptedWorker, server: RedisServer, story: list[Token]
) -> None:
    claimed, stream = begin(gateway, worker)
    worker.emit(claimed, story[:4])
    seen = stream.events(4)
    server.restart()
    emit_when_back(worker, claimed, story[4:], Finish("stop"))
    *rest, end = stream.events()
    assert [event.event_id for event in seen + rest] == list(range(1, len(story) + 1))
    assert end.name == "end"


def test_the_same_tokens_after_a_loss_are_not_sent_again(
    gateway: GatewayProcess, worker: ScriptedWorker, server: RedisServer, story: list[Token]
) -> None:
    claimed, stream = begin(gateway, worker)
    worker.emit(claimed, story[:3])
    snapshot = server.snapshot()
    worker.emit(claimed, story[3:6])
    seen = stream.events(6)
    server.roll_back(snapshot)
    emit_when_back(worker, claimed, story[3:], Finish("stop"))
    *rest, end = stream.events()
    assert [event.data["token"] for event in seen + rest] == [token.token_id for token in story]
    assert end.name == "end"


def test_other_tokens_after_a_loss_end_the_stream_with_an_error(
    gateway: GatewayProcess, worker: ScriptedWorker, server: RedisServer, story: list[Token]
) -> None:
    claimed, stream = begin(gateway, worker)
    worker.emit(claimed, story[:3])
    snapshot = server.snapshot()
    worker.emit(claimed, story[3:6])
    assert len(stream.events(6)) == 6
    server.roll_back(snapshot)
    others = [token._replace(token_id=token.token_id + 1) for token in story[3:]]
    emit_when_back(worker, claimed, others)
    (error,) = stream.events()
    assert (error.name, error.data["error"]["code"]) == ("error", "stream_diverged")


def test_an_end_before_what_was_sent_ends_the_stream_with_an_error(
    gateway: GatewayProcess, worker: ScriptedWorker, server: RedisServer, story: list[Token]
) -> None:
    claimed, stream = begin(gateway, worker)
    worker.emit(claimed, story[:3])
    snapshot = server.snapshot()
    worker.emit(claimed, story[3:6])
    assert len(stream.events(6)) == 6
    server.roll_back(snapshot)
    emit_when_back(worker, claimed, story[3:4], Finish("stop"))
    (error,) = stream.events()
    assert (error.name, error.data["error"]["code"]) == ("error", "stream_diverged")


def test_a_poll_waits_through_a_restart(
    gateway: GatewayProcess, worker: ScriptedWorker, server: RedisServer, story: list[Token]
) -> None:
    claimed, stream = begin(gateway, worker)
    stream.close()
    wait_for_followers(gateway, 0)
    connection = gateway.open("GET", f"/v1/requests/{claimed.hold.request_id}?wait=30")
    wait_for_followers(gateway, 1)
    server.restart()
    emit_when_back(worker, claimed, story, Finish("stop"))
    response = connection.getresponse()
    assert response.status == 200
    assert b'"status":"finished"' in response.read()
    connection.close()


def test_a_request_that_redis_forgot_ends_its_streams_with_an_error(
    gateway: GatewayProcess, worker: ScriptedWorker, server: RedisServer, story: list[Token]
) -> None:
    claimed, stream = begin(gateway, worker)
    openai = gateway.stream("POST", "/v1/completions", {"prompt": "Once", "stream": True})
    other = worker.claim()
    worker.emit(claimed, story[:2])
    worker.emit(other, story[:2])
    assert len(stream.events(2) + openai.events(2)) == 4
    server.kill()
    shutil.rmtree(server.directory / "appendonlydir")
    server.start()
    (error,) = stream.events()
    assert (error.name, error.data["error"]["code"]) == ("error", "request_lost")
    *_, error, done = openai.events()
    assert (error.data["error"]["code"], done.data) == ("request_lost", "[DONE]")


def test_without_redis_nothing_is_accepted_and_health_says_why(
    gateway: GatewayProcess, rooms: Rooms, server: RedisServer
) -> None:
    with ScriptedWorker(rooms):
        eventually(lambda: ready(gateway), "readiness")
        server.kill()
        for path, body in (
            ("/v1/requests", {"prompt": "a"}),
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            reply = gateway.call("POST", path, body)
            assert (reply.status, reply.body["error"]["code"]) == (503, "redis_away")
            assert int(reply.headers["Retry-After"]) >= 1
        assert gateway.call("GET", "/v1/requests/req-1").status == 503
        assert gateway.call("GET", "/health").status == 200
        eventually(lambda: gateway.call("GET", "/ready").body["missing"] == ["redis"], "it is missed")
        assert gateway.call("GET", "/ready").status == 503
        cluster = scraped(gateway, "/metrics/cluster")
        assert [(sample.name, sample.value) for sample in cluster] == [("kvrelay_redis_up", 0)]
        assert gateway.call("GET", "/metrics").status == 200
        server.start()
        eventually(lambda: ready(gateway), "readiness")


def test_a_server_that_may_not_write_counts_as_away(
    gateway: GatewayProcess, rooms: Rooms, server: RedisServer
) -> None:
    with ScriptedWorker(rooms), server.client() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", "1")  # as the old primary after a fail-over
        reply = gateway.call("POST", "/v1/requests", {"prompt": "a"})
        client.execute_command("REPLICAOF", "NO", "ONE")
        assert (reply.status, reply.body["error"]["code"]) == (503, "redis_away")
        assert gateway.call("POST", "/v1/requests", {"prompt": "a"}).status == 202
