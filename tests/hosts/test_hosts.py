"""Prefill, decode and Redis on three hosts: the same texts as on one, whatever happens to the cables."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway_rig import GatewayProcess
from tests.hosts.network import Host
from tests.hosts.stage import HOW, MBIT_PER_S, Stage, prompt
from tests.processes import until
from tests.relay_rig import Answer, Relay

CUT_S = 10.0
SEEDS = range(3)

heavy = pytest.mark.skipif(not os.environ.get("ALL_HOSTS"), reason="takes a minute: make hosts")


@pytest.fixture(scope="module")
def expected(stage: Stage) -> list[Answer]:
    """Of one worker on one host."""
    alone = Relay(stage.server, stage.relay.folder, "alone", MODEL=stage.relay.env["MODEL"])
    try:
        alone.start("unified", inside=stage.front.inside())
        alone.ready()
        return [alone.ask(prompt(seed), **HOW) for seed in SEEDS]
    finally:
        alone.close()


@pytest.fixture
def slowly(stage: Stage) -> Iterator[None]:
    stage.prefill.slow(MBIT_PER_S)
    yield
    stage.prefill.slow(None)


def test_no_worker_sees_another_and_the_texts_are_those_of_one_host(
    stage: Stage, expected: list[Answer]
) -> None:
    one, other = (card.incarnation for card in stage.relay.cards())
    assert one.host != other.host
    assert not one.proven_dead()
    assert {card.name.partition("@")[2] for card in stage.relay.cards()} == {"prefill", "decode"}
    assert stage.wait(stage.submit(*SEEDS)) == expected


def test_a_cable_cut_in_mid_transfer_costs_nothing(
    stage: Stage, expected: list[Answer], slowly: None
) -> None:
    ids = stage.submit(*SEEDS)
    stage.mid_transfer(stage.prefill)
    stage.prefill.cut()
    time.sleep(CUT_S)
    stage.prefill.connect()
    assert stage.wait(ids) == expected
    until(stage.relay.free, "every page is proven and free", 60)


PARTS = [("prefill", "decode"), ("prefill", "front"), ("decode", "front")]


@heavy
@pytest.mark.parametrize(("one", "other"), PARTS, ids=["-".join(part) for part in PARTS])
def test_hosts_that_cannot_reach_each_other_for_a_while(
    stage: Stage, expected: list[Answer], slowly: None, one: str, other: str
) -> None:
    hosts: tuple[Host, Host] = (getattr(stage, one), getattr(stage, other))
    ids = stage.submit(*SEEDS)
    stage.mid_transfer(stage.prefill)
    stage.network.part(*hosts)
    time.sleep(CUT_S)
    stage.network.join(*hosts)
    assert stage.wait(ids) == expected
    until(stage.relay.free, "every page is proven and free", 60)


@heavy
def test_a_peer_that_cannot_be_reached_holds_up_no_other(stage: Stage, expected: list[Answer]) -> None:
    """The connection to it is yet to be made; it has room for two requests."""
    host = stage.network.add("second")
    stage.network.part(host, stage.prefill)
    second = stage.start("decode", host, KV_POOL_TOKENS="1400")
    stage.relay.ready()
    ids = stage.submit(*SEEDS, *SEEDS)

    def ended() -> int:
        return sum(stage.relay.record(request_id).timings.ended > 0 for request_id in ids)

    until(lambda: ended() >= len(ids) - 2, "what the other worker has taken ends")
    assert ended() < len(ids)
    stage.network.join(host, stage.prefill)
    assert stage.wait(ids) == expected * 2
    until(stage.relay.free, "every page is free or cached")
    stage.relay.stop(second)


@heavy
def test_a_gateway_cut_off_from_redis_goes_on_with_its_stream(stage: Stage, tmp_path: Path) -> None:
    host = stage.network.add("gateway")
    body = {"model": "heavy", "prompt": "Hello", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    model = {"MODEL": stage.relay.env["MODEL"]}
    log = tmp_path / "gateway.log"
    with GatewayProcess(stage.server.url, "heavy", log, host.address, host.inside(), **model) as gateway:
        undisturbed = gateway.call("POST", "/v1/completions", body).body["choices"][0]["text"]
        stream = gateway.stream("POST", "/v1/completions", {**body, "stream": True})
        events = stream.events(5)
        stage.network.part(host, stage.front)
        until(lambda: gateway.call("GET", "/ready").status == 503, "it says that Redis is away")
        stage.network.join(host, stage.front)
        events += stream.events()
        assert events.pop().data == "[DONE]"
        assert "".join(event.data["choices"][0]["text"] for event in events) == undisturbed
        until(lambda: gateway.call("GET", "/ready").status == 200, "it is ready again")
        host.die()


@heavy
def test_what_a_host_that_died_may_have_written_is_set_aside_until_its_reader_restarts(
    stage: Stage, expected: list[Answer]
) -> None:
    stage.relay.stop(stage.writer)
    doomed = stage.network.add("doomed")
    worker = stage.start("prefill", doomed)
    stage.relay.stop(stage.reader)
    reader = stage.start("decode", stage.decode, QUARANTINE_AGE_S="15")
    stage.relay.ready()
    doomed.slow(MBIT_PER_S)
    ids = stage.submit(*SEEDS)
    stage.mid_transfer(doomed)
    doomed.die()
    stage.relay.workers.remove(worker)
    worker.process.wait()

    stage.writer = stage.start("prefill", stage.prefill)
    assert stage.wait(ids) == expected
    until(lambda: stage.quarantined_pages() > 0, "what the dead host may write is set aside")
    stage.relay.workers.remove(reader)
    assert reader.process.wait(60) == 0, "it drains and ends, for a supervisor to start it again"
    assert "quarantine_full" in reader.log.read_text()
    stage.reader = stage.start("decode", stage.decode)
    stage.relay.ready()
    assert stage.wait(stage.submit(*SEEDS)) == expected
    until(stage.relay.free, "every page is free or cached")
