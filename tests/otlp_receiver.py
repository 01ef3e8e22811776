"""A collector as far as a test needs one: it takes OTLP over HTTP and keeps the spans."""

import gzip
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Received(NamedTuple):
    """One span as it came; ids in hex, moments in ns since the epoch."""

    name: str
    span_id: str
    parent_id: str
    trace_id: str
    state: str
    resource: Mapping[str, Any]
    attributes: Mapping[str, Any]
    start_ns: int
    end_ns: int
    events: list[tuple[str, Mapping[str, Any]]]
    links: list[str]
    failed: bool


class OtlpReceiver:
    """Listens on a free port of loopback. While `refuses` it answers 503."""

    def __init__(self) -> None:
        self.refuses = False
        self._spans: dict[str, Received] = {}
        self._lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if receiver.refuses or self.path != "/v1/traces":
                    self.send_error(503 if receiver.refuses else 404)
                    return
                packed = gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body
                receiver._take(ExportTraceServiceRequest.FromString(packed))
                reply = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def spans(self, trace_id: str) -> list[Received]:
        """By their beginnings; what came twice is there once."""
        with self._lock:
            return sorted(
                (s for s in self._spans.values() if s.trace_id == trace_id), key=lambda s: s.start_ns
            )

    def _take(self, request: ExportTraceServiceRequest) -> None:
        taken = {}
        for of_resource in request.resource_spans:
            resource = _attributes(of_resource.resource.attributes)
            for span in (span for of_scope in of_resource.scope_spans for span in of_scope.spans):
                received = Received(
                    name=span.name,
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    trace_id=span.trace_id.hex(),
                    state=span.trace_state,
                    resource=resource,
                    attributes=_attributes(span.attributes),
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    events=[(event.name, _attributes(event.attributes)) for event in span.events],
                    links=[link.span_id.hex() for link in span.links],
                    failed=span.status.code == span.status.STATUS_CODE_ERROR,
                )
                taken[received.span_id] = received
        with self._lock:
            self._spans |= taken


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
