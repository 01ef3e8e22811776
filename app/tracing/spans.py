"""The timeline of a request as spans of OpenTelemetry: one root, and below it what each process did."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from relay.request import Leg, Record, State
from relay.routing import queue_of
from relay.timeline import GATEWAY, Span, Timeline
from relay.trace_context import TraceContext

_SCOPE = InstrumentationScope("kvrelay")
_SYSTEM = "kvrelay"
_OPERATIONS = {"chat": "chat", "response": "chat", "generate": "text_completion"}
_RELEASED = "released"


def parent_of(context: TraceContext) -> Context:
    """The client's span, as samplers take it; of nobody an empty one."""
    if not context.has_parent:
        return Context()
    return set_span_in_context(NonRecordingSpan(_remote(context)), Context())


def spans_of(timeline: Timeline, model: str) -> list[ReadableSpan]:
    """Of a request that has ended, the root first. Ids follow from that of the request: what is made twice is
    the same. A leg that was released is an event of the root, and the next attempt's first span links to what
    was cut off."""
    record, spans = timeline.record, timeline.spans()
    context = record.trace
    if context is None or not spans:
        return []
    ids = [_context(context, f"{record.request_id}/{place}") for place in range(len(spans))]
    root = _context(context, record.request_id)
    cut_off: dict[int, SpanContext] = {}  # by attempt
    made = [_root(timeline, model, context, root, spans)]
    for span, own in zip(spans, ids, strict=True):
        if span.name == _RELEASED:
            continue
        before = cut_off.get(span.attempt - 1) if span.name == "queued" and span.parent is None else None
        made.append(
            ReadableSpan(
                name=span.name,
                context=own,
                parent=root if span.parent is None else ids[span.parent],
                resource=_resource(span.process),
                attributes=_attributes(span, record, model),
                links=[Link(before, {"kvrelay.link": "previous attempt"})] if before else [],
                start_time=_ns(span.start_ms),
                end_time=_ns(span.start_ms if span.end_ms is None else span.end_ms),
                instrumentation_scope=_SCOPE,
            )
        )
        cut_off[span.attempt] = own
    return made


def _root(
    timeline: Timeline, model: str, context: TraceContext, own: SpanContext, spans: Sequence[Span]
) -> ReadableSpan:
    record = timeline.record
    operation = _OPERATIONS.get(record.kind, "text_completion")
    failed = record.state is State.FAILED
    return ReadableSpan(
        name=f"{operation} {model}",
        context=own,
        parent=_remote(context) if context.has_parent else None,
        resource=_resource(GATEWAY),
        attributes=dict(_of_request(record, operation, model, timeline.arrived_ms)),
        events=[
            Event(_RELEASED, _prefixed(span), _ns(span.start_ms)) for span in spans if span.name == _RELEASED
        ],
        kind=SpanKind.SERVER,
        status=Status(StatusCode.ERROR, record.error_message) if failed else Status(StatusCode.UNSET),
        start_time=_ns(timeline.arrived_ms),
        end_time=_ns(record.timings.ended),
        instrumentation_scope=_SCOPE,
    )


def _of_request(record: Record, operation: str, model: str, arrived_ms: float) -> Iterator[tuple[str, Any]]:
    """The GenAI conventions, and the names that they had before, which other servers still send."""
    params, t = record.params, record.timings
    yield "gen_ai.operation.name", operation
    yield "gen_ai.provider.name", _SYSTEM
    yield "gen_ai.system", _SYSTEM
    yield "gen_ai.request.model", model
    yield "gen_ai.response.model", model
    yield "gen_ai.request.id", record.request_id
    yield "gen_ai.response.id", record.request_id
    yield "gen_ai.request.n", 1
    yield "gen_ai.request.max_tokens", params.max_tokens
    yield "gen_ai.request.temperature", params.temperature
    yield "gen_ai.request.top_p", params.top_p
    yield "gen_ai.request.top_k", params.top_k
    yield "gen_ai.request.seed", params.seed
    yield "gen_ai.request.frequency_penalty", params.frequency_penalty
    yield "gen_ai.request.presence_penalty", params.presence_penalty
    if params.stop:
        yield "gen_ai.request.stop_sequences", list(params.stop)
    yield "gen_ai.usage.input_tokens", record.prompt_tokens
    yield "gen_ai.usage.prompt_tokens", record.prompt_tokens
    yield "gen_ai.usage.output_tokens", record.completion_tokens
    yield "gen_ai.usage.completion_tokens", record.completion_tokens
    yield "gen_ai.usage.cache_read.input_tokens", record.cached_tokens
    if record.finish_reason:
        yield "gen_ai.response.finish_reasons", [record.finish_reason]
    if record.error_code:
        yield "error.type", record.error_code
    yield "kvrelay.status", record.state.value
    yield "kvrelay.attempts", record.attempts
    for name, start_ms, end_ms in (
        ("time_in_queue", t.submitted, t.claimed),
        ("time_to_first_token", arrived_ms, t.first_token),
        ("time_in_model_prefill", t.prefill_start, t.prefill_end),
        ("time_in_model_decode", t.first_token, t.ended),
        ("e2e", arrived_ms, t.ended),
    ):
        if 0 < start_ms <= end_ms:
            yield f"gen_ai.latency.{name}", (end_ms - start_ms) / 1000


def _attributes(span: Span, record: Record, model: str) -> Mapping[str, Any]:
    attributes = {"gen_ai.request.id": record.request_id, "kvrelay.attempt": span.attempt, **_prefixed(span)}
    if span.name == "queued" and "leg" in span.attributes:
        queue = queue_of(Leg(span.attributes["leg"]), model)
        attributes |= {"messaging.system": "celery", "messaging.destination.name": queue}
    return attributes


def _prefixed(span: Span) -> dict[str, Any]:
    return {f"kvrelay.{name}": value for name, value in span.attributes.items()}


def _context(context: TraceContext, name: str) -> SpanContext:
    span_id = int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) or 1
    return SpanContext(
        int(context.trace_id, 16),
        span_id,
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
        trace_state=TraceState.from_header([context.state]),
    )


def _remote(context: TraceContext) -> SpanContext:
    return SpanContext(
        int(context.trace_id, 16),
        int(context.parent_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if context.sampled else TraceFlags.DEFAULT),
        trace_state=TraceState.from_header([context.state]),
    )


@cache
def _resource(process: str) -> Resource:
    """OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES go before."""
    return Resource.create({"service.instance.id": process}).merge(_named())


@cache
def _named() -> Resource:
    from_env = Resource.create({})
    unnamed = str(from_env.attributes["service.name"]).startswith("unknown_service")
    return Resource({"service.name": "kvrelay"}) if unnamed else Resource({})


def _ns(ms: float) -> int:
    return round(ms * 1000) * 1000
