"""A trace through the real relay, as a collector gets it: also of a request whose worker was killed."""

import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.gateway_rig import GatewayProcess
from tests.otlp_receiver import OtlpReceiver, Received
from tests.processes import until
from tests.relay_rig import Relay, tiny_model
from tests.servers import RedisServer

MODEL = "traced"
PROMPT = [5 + i % 50 for i in range(150)]  # three chunks of 64 tokens at most
CLIENT_SPAN = "00f067aa0ba902b7"
EXPORT_S = 20.0


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> str:
    return str(tiny_model(folder / "tiny", max_position_embeddings=1024))


@pytest.fixture(scope="module")
def relay(valkey: RedisServer, folder: Path, tiny: str) -> Iterator[Relay]:
    relay = Relay(valkey, folder, MODEL, MODEL=tiny)
    relay.start("prefill", "decode")
    relay.ready()
    yield relay
    relay.close()


@pytest.fixture(scope="module")
def gateway(
    valkey: RedisServer, folder: Path, tiny: str, collector: OtlpReceiver
) -> Iterator[GatewayProcess]:
    otel = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_RESOURCE_ATTRIBUTES": "deployment=test"}
    with GatewayProcess(valkey.url, MODEL, folder / "gateway.log", MODEL=tiny, **otel) as process:
        yield process


def submit(gateway: GatewayProcess, trace_id: str, max_tokens: int, flags: str = "01") -> str:
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True}
    context = {"traceparent": f"00-{trace_id}-{CLIENT_SPAN}-{flags}", "tracestate": "vendor=abc"}
    reply = gateway.call("POST", "/v1/requests", body, **context)
    assert reply.status == 202, reply.raw
    request_id: str = reply.body["id"]
    return request_id


def exported(collector: OtlpReceiver, trace_id: str) -> list[Received]:
    """Once the root is there: a trace comes whole."""
    spans: list[Received] = until(lambda: collector.spans(trace_id), f"trace {trace_id} arrives", EXPORT_S)
    return spans


def tree(spans: Sequence[Received]) -> Counter[tuple[str, ...]]:
    """Paths of names from the root on."""
    by_id = {span.span_id: span for span in spans}

    def path(span: Received) -> tuple[str, ...]:
        parent = by_id.get(span.parent_id)
        return (*(path(parent) if parent else ()), span.name)

    return Counter(map(path, spans))


def root_of(spans: Sequence[Received]) -> Received:
    (root,) = (span for span in spans if span.parent_id == CLIENT_SPAN)
    assert all(root.start_ns <= span.start_ns <= span.end_ns <= root.end_ns for span in spans)
    assert {span.state for span in spans} == {"vendor=abc"}
    assert {span.resource["service.name"] for span in spans} == {"kvrelay"}
    assert {span.resource["deployment"] for span in spans} == {"test"}
    return root


ROOT = f"text_completion {MODEL}"
LEG = {
    (ROOT, "queued"): 1,
    (ROOT, "bootstrap"): 1,
    (ROOT, "bootstrap", "queued"): 1,
    (ROOT, "bootstrap", "reserve"): 1,
    (ROOT, "wait"): 1,
    (ROOT, "prefill"): 1,
    (ROOT, "transfer"): 1,
    (ROOT, "transfer", "seal"): 1,
    (ROOT, "admit"): 1,
    (ROOT, "decode"): 1,
}


def without_pieces(spans: Sequence[Received]) -> dict[tuple[str, ...], int]:
    return {path: count for path, count in tree(spans).items() if path[-1] not in ("chunk", "send")}


def test_a_trace_has_the_whole_relay_below_the_client_s_span(
    relay: Relay, gateway: GatewayProcess, collector: OtlpReceiver
) -> None:
    trace_id = f"{1:032x}"
    request_id = submit(gateway, trace_id, max_tokens=5)
    relay.wait(request_id)
    spans = exported(collector, trace_id)
    root = root_of(spans)
    assert without_pieces(spans) == {(ROOT,): 1, (ROOT, "accept"): 1} | LEG
    assert tree(spans)[ROOT, "prefill", "chunk"] == 3
    assert tree(spans)[ROOT, "transfer", "send"] >= 1
    names = {card.role: card.name for card in relay.cards()}
    where = {span.name: span.resource["service.instance.id"] for span in spans}
    assert (where[ROOT], where["prefill"], where["send"], where["decode"]) == (
        *("gateway", names["prefill"], names["prefill"], names["decode"]),
    )
    assert root.attributes["gen_ai.response.id"] == request_id
    assert (
        root.attributes["gen_ai.usage.input_tokens"] == root.attributes["gen_ai.usage.prompt_tokens"] == 150
    )
    assert root.attributes["gen_ai.usage.output_tokens"] == 5
    assert (root.events, root.failed) == ([], False)
    for worker in relay.workers:
        assert f"request={request_id} trace_id={trace_id}" in worker.log.read_text()


def test_a_trace_survives_the_worker_that_was_killed_in_it(
    relay: Relay, gateway: GatewayProcess, collector: OtlpReceiver
) -> None:
    trace_id = f"{2:032x}"
    request_id = submit(gateway, trace_id, max_tokens=800)
    relay.reaches(request_id, lambda record: record.completion_tokens, "it decodes")
    doomed = next(worker for worker in relay.workers if worker.role == "decode")
    doomed.send(signal.SIGKILL)
    doomed.process.wait()
    relay.workers.remove(doomed)
    relay.start("decode")
    relay.wait(request_id)
    spans = exported(collector, trace_id)
    root = root_of(spans)
    twice = {path: 2 * count for path, count in LEG.items()}
    assert without_pieces(spans) == {(ROOT,): 1, (ROOT, "accept"): 1} | twice
    assert root.events == [("released", {"kvrelay.leg": "decode", "kvrelay.why": "expired"})]
    first, second = (span for span in spans if span.name == "decode")
    assert first.resource["service.instance.id"] != second.resource["service.instance.id"]
    assert [span.attributes["kvrelay.attempt"] for span in (first, second)] == [1, 2]
    assert first.attributes["kvrelay.tokens"] + second.attributes["kvrelay.tokens"] == 800
    again = [span for span in spans if span.name == "queued" and span.parent_id == root.span_id][1]
    assert again.links == [first.span_id]


def test_what_the_client_does_not_sample_is_not_exported(
    relay: Relay, gateway: GatewayProcess, collector: OtlpReceiver
) -> None:
    silent, told = f"{3:032x}", f"{4:032x}"
    relay.wait(submit(gateway, silent, max_tokens=1, flags="00"))
    relay.wait(submit(gateway, told, max_tokens=1))
    exported(collector, told)
    assert collector.spans(silent) == []
