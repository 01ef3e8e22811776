"""Sends the traces of ended requests to a collector, from a thread of its own."""

import logging
import threading
from collections.abc import Mapping, Sequence
from itertools import chain

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from redis.exceptions import RedisError

from app.tracing.spans import spans_of
from relay.log import event
from relay.rooms import Rooms

log = logging.getLogger(__name__)

POLL_S = 1.0
BATCH = 64  # requests per call to the collector
AGAIN_MS = 30_000  # longer than an export may take
CLOSE_S = 5.0


class TraceExport:
    """Redis has the list of what is to be exported. Any gateway may take from it, and drops a request there
    when the collector has it: so a killed worker, a killed gateway or a collector that is away costs no
    trace. What comes twice has the same ids.
    """

    def __init__(self, rooms: Rooms, model: str, exporter: SpanExporter) -> None:
        self._rooms = rooms
        self._model = model
        self._exporter = exporter
        self._closing = threading.Event()
        self._away = False
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Within CLOSE_S; what is left is for another gateway, or the next one."""
        self._closing.set()
        self._exporter.shutdown()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                more = self._export_some()
            except RedisError:
                more = False  # it is told where requests are served
            except Exception:
                log.exception("trace_export_failed")
                more = False
            if not more:
                self._closing.wait(POLL_S)

    def _export_some(self) -> bool:
        """Whether there may be more at once."""
        request_ids = self._rooms.take_traces(BATCH, AGAIN_MS)
        if not request_ids:
            return False
        if not self._exported(request_ids):
            return False
        self._rooms.drop_traces(request_ids)
        return len(request_ids) == BATCH

    def _exported(self, request_ids: Sequence[str]) -> bool:
        traces = {request_id: self._spans(request_id) for request_id in request_ids}
        spans = list(chain.from_iterable(traces.values()))
        if not spans:
            return True  # their records have expired
        try:
            done = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception:
            self._drop_what_no_message_holds(traces)
            raise
        if done is self._away:
            self._away = not done
            level = logging.INFO if done else logging.WARNING
            event(log, "traces_exported" if done else "trace_export_failed", level, requests=len(request_ids))
        return done

    def _spans(self, request_id: str) -> list[ReadableSpan]:
        """None of a trace that cannot be made: it must not hold up those that come with it."""
        try:
            found = self._rooms.timeline(request_id)
            return spans_of(found, self._model) if found else []
        except RedisError:
            raise
        except Exception:
            self._drop(request_id)
            return []

    def _drop_what_no_message_holds(self, traces: Mapping[str, Sequence[ReadableSpan]]) -> None:
        """The others come again without it."""
        for request_id, spans in traces.items():
            try:
                encode_spans(spans)
            except Exception:
                self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        self._rooms.drop_traces([request_id])
        log.exception("trace_dropped request=%s", request_id)
