"""Which trace a request belongs to, when traces are exported, and what spans they have."""

import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import DEFAULT_OFF, DEFAULT_ON
from opentelemetry.trace import StatusCode
from redis.exceptions import ConnectionError

from app.tracing import trace_export
from app.tracing.spans import spans_of
from app.tracing.trace_export import TraceExport
from app.tracing.tracing import Tracing, can_trace
from relay.request import Record, State, Timings
from relay.sampling import SamplingParams
from relay.settings import SettingsError
from relay.timeline import Entry, Timeline
from relay.trace_context import TraceContext
from tests.processes import until

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CLIENT = TraceContext(TRACE, SPAN, True, "vendor=abc")
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.mark.parametrize(
    ("traceparent", "expected"),
    [
        (f"00-{TRACE}-{SPAN}-01", TraceContext(TRACE, SPAN, True)),
        (f" 00-{TRACE}-{SPAN}-00 ", TraceContext(TRACE, SPAN, False)),
        (f"00-{TRACE}-{SPAN}-03", TraceContext(TRACE, SPAN, True)),
        (f"01-{TRACE}-{SPAN}-01-more", TraceContext(TRACE, SPAN, True)),
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{32 * '0'}-{SPAN}-01", None),
        (f"00-{TRACE}-{16 * '0'}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}", None),
        ("", None),
        ("00-xyz", None),
    ],
)
def test_a_trace_is_what_w3c_says(traceparent: str, expected: TraceContext | None) -> None:
    assert TraceContext.received(traceparent) == expected


@pytest.mark.parametrize("state", ["", "a=1,b=2", "x" * 512, "a=1 b"])
def test_a_context_comes_back_as_it_was_recorded(state: str) -> None:
    for context in (CLIENT._replace(state=state), TraceContext.new()._replace(state=state)):
        assert TraceContext.unpack(context.pack()) == context


def test_a_state_that_is_too_long_is_dropped() -> None:
    context = TraceContext.received(f"00-{TRACE}-{SPAN}-01", "x" * 513)
    assert context
    assert context.state == ""


@pytest.mark.parametrize(
    ("env", "on"),
    [
        ({}, False),
        ({ENDPOINT: "http://here:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://here:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", ENDPOINT: "http://here:4318"}, False),
        ({"OTEL_SDK_DISABLED": "true", ENDPOINT: "http://here:4318"}, False),
    ],
)
def test_traces_are_on_where_the_standard_variables_say_so(env: dict[str, str], on: bool) -> None:
    assert can_trace(env) is on


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER"),
        (
            {ENDPOINT: "http://here:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL",
        ),
    ],
)
def test_what_cannot_be_done_is_said(env: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        can_trace(env)


@pytest.mark.parametrize("missing", ["opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"])
def test_without_the_extra_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SettingsError, match=r"pip install 'kvrelay\[otel\]'"):
        can_trace({"OTEL_TRACES_EXPORTER": "otlp"})


def test_the_client_decides_about_its_own_trace() -> None:
    for sampler, without_parent in ((DEFAULT_ON, True), (DEFAULT_OFF, False)):
        decides = Tracing(sampler, None)  # type: ignore[arg-type]
        assert decides.samples(CLIENT)
        assert not decides.samples(CLIENT._replace(sampled=False))
        assert decides.samples(TraceContext.new()) is without_parent


def entry(name: str, at_ms: float, leg: str = "", tokens: int = 0, detail: str = "") -> Entry:
    return Entry(name, 1e12 + at_ms, leg, tokens, detail)


RETRIED = [
    entry("submitted", 1, detail="1.0"),
    entry("queued", 1, "prefill"),
    entry("claimed", 2, "both", 0, "U1"),
    entry("first", 5, "decode", 1),
    entry("released", 9, "decode", 4, "expired"),
    entry("queued", 9, "prefill", 4),
    entry("claimed", 10, "both", 4, "U2"),
    entry("first", 12, "decode", 5),
    entry("ended", 20, "", 8, "finished"),
]


def timeline(context: TraceContext | None = CLIENT, state: State = State.FINISHED, **more: Any) -> Timeline:
    timings = Timings(1e12 + 1, 1e12 + 10, first_token=1e12 + 5, ended=1e12 + 20)
    of_end = {"error_code": None, "error_message": None} | more
    record = Record(
        "req-1", state, "chat", "", SamplingParams(9, stop=("x",)), 4, 8, 2, 2, 0, "stop", None, **of_end,
        timings=timings, trace=context,
    )  # fmt: skip
    return Timeline(record, RETRIED, 1e12 + 30)


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time
    assert span.end_time
    return span.start_time, span.end_time


def test_a_trace_is_one_tree_below_the_span_of_the_client() -> None:
    root, *others = spans_of(timeline(), "m")
    assert root.parent
    assert (root.name, root.parent.span_id) == ("chat m", int(SPAN, 16))
    assert {span.context.trace_id for span in (root, *others)} == {int(TRACE, 16)}
    assert {span.context.trace_state.to_header() for span in (root, *others)} == {"vendor=abc"}
    assert all(span.parent and span.parent.span_id == root.context.span_id for span in others)
    assert len({span.context.span_id for span in (root, *others)}) == 1 + len(others)
    assert [(s.name, s.resource.attributes["service.instance.id"]) for s in others] == [
        *(("accept", "gateway"), ("queued", "gateway"), ("prefill", "U1"), ("decode", "U1")),
        *(("queued", "gateway"), ("prefill", "U2"), ("decode", "U2")),
    ]
    assert {s.resource.attributes["service.name"] for s in (root, *others)} == {"kvrelay"}
    start, end = times(root)
    assert (start, end) == (10**18, 10**18 + 20_000_000)
    assert all(start <= times(s)[0] <= times(s)[1] <= end for s in others)


def test_a_retry_is_an_event_and_a_link_to_what_was_cut_off() -> None:
    root, *others = spans_of(timeline(), "m")
    assert [(e.name, dict(e.attributes or {})) for e in root.events] == [
        ("released", {"kvrelay.leg": "decode", "kvrelay.why": "expired"})
    ]
    first_decode, second_queued = others[3], others[4]
    assert [link.context.span_id for link in second_queued.links] == [first_decode.context.span_id]
    assert second_queued.attributes
    assert second_queued.attributes["messaging.destination.name"] == "prefill.m"
    assert second_queued.attributes["kvrelay.attempt"] == 2


def test_the_names_of_genai_old_and_new() -> None:
    root, *_ = spans_of(timeline(), "m")
    attributes = dict(root.attributes or {})
    for new, old in (("input", "prompt"), ("output", "completion")):
        assert attributes[f"gen_ai.usage.{new}_tokens"] == attributes[f"gen_ai.usage.{old}_tokens"]
    assert attributes["gen_ai.response.id"] == attributes["gen_ai.request.id"] == "req-1"
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.provider.name"] == attributes["gen_ai.system"] == "kvrelay"
    assert attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert attributes["gen_ai.request.stop_sequences"] == ["x"]
    assert attributes["gen_ai.latency.time_to_first_token"] == pytest.approx(0.005)
    assert attributes["gen_ai.latency.e2e"] == pytest.approx(0.020)


def test_made_again_it_is_the_same() -> None:
    first, second = (spans_of(timeline(), "m") for _ in range(2))
    assert [s.to_json() for s in first] == [s.to_json() for s in second]


def test_a_request_without_a_client_s_trace_has_a_root_of_its_own() -> None:
    context = TraceContext.new()._replace(sampled=True)
    root, *_ = spans_of(timeline(context), "m")
    assert root.parent is None
    assert f"{root.context.trace_id:032x}" == context.trace_id


def test_a_failure_is_the_root_s_status() -> None:
    root, *_ = spans_of(timeline(state=State.FAILED, error_code="timeout", error_message="too late"), "m")
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, "too late")
    assert dict(root.attributes or {})["error.type"] == "timeout"


class Waiting:
    """Rooms with traces that wait; some calls find no server."""

    def __init__(self, *request_ids: str) -> None:
        self.left = list(request_ids)
        self.away = 0

    def take_traces(self, limit: int, again_ms: int) -> list[str]:
        if self.away:
            self.away -= 1
            raise ConnectionError("nobody listens")
        return self.left[:limit]

    def timeline(self, request_id: str) -> Timeline | None:
        match request_id:
            case "expired":
                return None
            case "unreadable":
                raise ValueError("no such state")
            case "endless":  # its times do not fit into a message
                found = timeline()
                timings = replace(found.record.timings, ended=1e30)
                return found._replace(record=replace(found.record, timings=timings))
        return timeline()

    def drop_traces(self, request_ids: Sequence[str]) -> None:
        self.left = [request_id for request_id in self.left if request_id not in request_ids]


class Collector(SpanExporter):
    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.calls: list[int] = []
        self.closed = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        encode_spans(spans)
        self.calls.append(len(spans))
        if self.refusals:
            self.refusals -= 1
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.closed.set()


def test_what_no_collector_took_stays_until_one_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_export, "POLL_S", 0.01)
    rooms, collector = Waiting("a", "b"), Collector(refusals=2)
    rooms.away = 2
    export = TraceExport(rooms, "m", collector)  # type: ignore[arg-type]
    until(lambda: not rooms.left, "both are exported", 10)
    export.close()
    assert collector.calls == [16, 16, 16]
    assert collector.closed.is_set()


def test_a_record_that_has_expired_is_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_export, "POLL_S", 0.01)
    rooms, collector = Waiting("expired"), Collector(refusals=0)
    export = TraceExport(rooms, "m", collector)  # type: ignore[arg-type]
    until(lambda: not rooms.left, "it is dropped", 10)
    export.close()
    assert collector.calls == []


@pytest.mark.parametrize("broken", ["unreadable", "endless"])
def test_a_trace_that_cannot_be_made_holds_up_no_other(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace_export, "POLL_S", 0.01)
    rooms, collector = Waiting("a", broken, "b"), Collector(refusals=1)
    export = TraceExport(rooms, "m", collector)  # type: ignore[arg-type]
    until(lambda: not rooms.left, "the others are exported, and it is dropped", 10)
    export.close()
    assert collector.calls == [16, 16]
    assert [record.message for record in caplog.records if "trace_dropped" in record.message] == [
        f"trace_dropped request={broken}"
    ]
