"""Redis behind three Sentinels: its master dies under load, and workers and gateway go on with the next."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
from redis import Redis
from redis.exceptions import RedisError

from relay.request import State
from tests.flower_rig import FlowerProcess
from tests.gateway_rig import GatewayProcess, Reply, eventually
from tests.processes import until
from tests.relay_rig import Relay, celery_app, tiny_model
from tests.servers import RedisServer, free_port, redis_binary

MASTER = "main"
DOWN_AFTER_MS = 1_000
ARGS: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}
REQUESTS = 12


class Guarded:
    """A master and a replica, and three Sentinels, two of which must agree."""

    def __init__(self, binary: Path, folder: Path) -> None:
        options = ["--min-replicas-max-lag", "10", "--repl-diskless-sync-delay", "0"]
        self.servers = [RedisServer(binary, folder / f"redis-{i}", "everysec", options) for i in (1, 2)]
        self._binary = binary
        self._folder = folder
        self._ports = [free_port() for _ in range(3)]

    @property
    def url(self) -> str:
        return f"sentinel://{','.join(f'127.0.0.1:{port}' for port in self._ports)}/{MASTER}"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            master, replica = (stack.enter_context(server) for server in self.servers)
            with replica.client() as client:
                client.replicaof("127.0.0.1", master.port)
                until(lambda: client.info("replication")["master_link_status"] == "up", "it replicates")
            for port in self._ports:
                stack.callback(self._start_sentinel(port, master.port).kill)
            for port in self._ports:
                until(lambda port=port: self._knows_all(port), "a Sentinel knows the others and the replica")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start_sentinel(self, port: int, master_port: int) -> subprocess.Popen[bytes]:
        config = self._folder / f"sentinel-{port}.conf"
        config.write_text(
            f"bind 127.0.0.1\nport {port}\ndir {self._folder}\n"
            f"sentinel monitor {MASTER} 127.0.0.1 {master_port} 2\n"
            f"sentinel down-after-milliseconds {MASTER} {DOWN_AFTER_MS}\n"
            f"sentinel failover-timeout {MASTER} 10000\n"
        )
        with (self._folder / f"sentinel-{port}.log").open("wb") as log:
            command = [str(self._binary), str(config), "--sentinel"]
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def named(self) -> set[int]:
        """The ports at which the Sentinels see a living master."""
        masters = [self._master(port) for port in self._ports]
        return {master["port"] if not master["is_odown"] else 0 for master in masters}

    def _master(self, port: int) -> dict[str, Any]:
        with Redis(port=port, socket_timeout=1) as sentinel:
            found: dict[str, Any] = sentinel.sentinel_masters()[MASTER]
            return found

    def _knows_all(self, port: int) -> bool:
        try:
            master = self._master(port)
        except (RedisError, KeyError):
            return False
        return (master["num-other-sentinels"], master["num-slaves"]) == (2, 1)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    binary = redis_binary()
    if binary is None:
        pytest.skip("redis-server is not installed: run tests/setup.sh to test Sentinel")
    with Guarded(binary, tmp_path) as guarded:
        yield guarded


def test_a_fail_over_loses_nothing_that_was_replicated(guarded: Guarded, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny", max_position_embeddings=1024)
    relay = Relay(guarded, tmp_path, "guarded", MODEL=str(model))
    try:
        relay.start("prefill", "decode")
        relay.ready()
        prompts = [tuple(range(5 + i, 45 + i)) for i in range(REQUESTS)]
        undisturbed = [relay.ask(prompt, **ARGS).tokens for prompt in prompts[:2]]
        with (
            GatewayProcess(guarded.url, "guarded", tmp_path / "gateway.log", MODEL=str(model)) as gateway,
            FlowerProcess(relay.env, tmp_path) as flower,
        ):
            names = {card.name for card in relay.cards()}
            until(lambda: names <= flower.workers(), "Flower shows both workers")
            ids = [relay.submit(prompt, **ARGS) for prompt in prompts]
            relay.reaches(ids[0], lambda record: record.completion_tokens, "it decodes")
            master, replica = guarded.servers
            with master.client() as client:
                assert client.wait(1, 5_000) == 1, "what was accepted is on the replica"
            master.kill()
            until(lambda: guarded.named() == {replica.port}, "all Sentinels name the replica")

            answers = [relay.wait(request_id) for request_id in ids]
            assert {answer.end.state for answer in answers} == {State.FINISHED}
            assert [len(answer.tokens) for answer in answers] == [ARGS["max_tokens"]] * REQUESTS
            assert [answer.tokens for answer in answers[:2]] == undisturbed

            eventually(lambda: gateway.call("GET", "/ready").status == 200, "the gateway is ready")
            body = {"model": "guarded", "prompt": "Hello", "max_tokens": 5}
            ask = partial(gateway.call, "POST", "/v1/completions", body)
            assert ask().status == 200
            refuses_to_write_for_a_while(relay, replica, ask)
            until(lambda: names <= flower.workers(), "Flower reaches both workers")
            assert flower.messages() == [0, 0]
            relay.app = celery_app(guarded.url)  # the old one waits for the old master
            until(relay.free, "every page is free or cached")
    finally:
        relay.close()


def refuses_to_write_for_a_while(relay: Relay, master: RedisServer, ask: Callable[[], Reply]) -> None:
    """As one does that is cut off from the others, and has `min-replicas-to-write`."""
    with master.client() as client:
        client.config_set("min-replicas-to-write", 1)
        for worker in relay.workers:
            until(lambda log=worker.log: "NOREPLICAS" in log.read_text(), f"{worker.name} notices")
        assert ask().status == 503
        client.config_set("min-replicas-to-write", 0)
    until(lambda: ask().status == 200, "requests run again")
