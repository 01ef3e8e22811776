"""A request's timeline as clients see it."""

from typing import Any

from relay.timeline import Span, Timeline


def timeline_view(timeline: Timeline) -> dict[str, Any]:
    """Moments in ms since the request arrived; `attempts` counts each way from the queue on."""
    spans, arrived_ms = timeline.spans(), timeline.arrived_ms
    return {
        "id": timeline.record.request_id,
        "status": timeline.record.state.value,
        "trace_id": timeline.record.trace.trace_id if timeline.record.trace else None,
        "arrived": round(arrived_ms / 1000, 6),
        "now_ms": round(timeline.now_ms - arrived_ms, 3),
        "attempts": max((span.attempt for span in spans), default=1),
        "spans": [_span_view(span, arrived_ms) for span in spans],
    }


def _span_view(span: Span, arrived_ms: float) -> dict[str, Any]:
    end_ms = None if span.end_ms is None else round(span.end_ms - arrived_ms, 3)
    return span._asdict() | {"start_ms": round(span.start_ms - arrived_ms, 3), "end_ms": end_ms}
