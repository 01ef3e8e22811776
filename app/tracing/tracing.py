"""OpenTelemetry, where its own variables in the environment ask for it; else it is not even imported."""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from relay.rooms import Rooms
from relay.settings import SettingsError
from relay.trace_context import TraceContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.sampling import Sampler

    from app.tracing.trace_export import TraceExport

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HTTP = "http/protobuf"
_EXPORTER = "opentelemetry.exporter.otlp.proto.http"


class Tracing:
    """Decides which requests are traced, and exports them when they have ended."""

    def __init__(self, sampler: "Sampler", export: "TraceExport") -> None:
        self._sampler = sampler
        self._export = export

    def samples(self, context: TraceContext) -> bool:
        """As the client's span is sampled, if there is one and OTEL_TRACES_SAMPLER does not say otherwise."""
        from app.tracing.spans import parent_of

        decision = self._sampler.should_sample(parent_of(context), int(context.trace_id, 16), "kvrelay")
        return decision.decision.is_sampled()

    def close(self) -> None:
        self._export.close()


def tracing(rooms: Rooms, model: str, env: Mapping[str, str] = os.environ) -> Tracing | None:
    """None where it is off. Starts a thread. Raises SettingsError for what cannot be done."""
    if not can_trace(env):
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider

    from app.tracing.trace_export import TraceExport

    sampler = TracerProvider(shutdown_on_exit=False).sampler  # it reads OTEL_TRACES_SAMPLER
    return Tracing(sampler, TraceExport(rooms, model, OTLPSpanExporter()))


def can_trace(env: Mapping[str, str]) -> bool:
    """Whether traces are asked for. Raises SettingsError where they cannot be."""
    exporter = env.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or exporter == "none":
        return False
    if exporter not in ("", "otlp"):
        raise SettingsError(f"OTEL_TRACES_EXPORTER={exporter!r} cannot be used; allowed: otlp, none")
    if not exporter and not any(env.get(name) for name in _ENDPOINTS):
        return False
    protocol = next((env[name] for name in _PROTOCOLS if env.get(name)), _HTTP)
    if protocol != _HTTP:
        raise SettingsError(f"{_PROTOCOLS[1]}={protocol!r} cannot be used; allowed: {_HTTP}, port 4318")
    if not all(map(_installed, ("opentelemetry.sdk", _EXPORTER))):
        raise SettingsError(
            "traces are asked for, and OpenTelemetry is not installed: pip install 'kvrelay[otel]',"
            " or set OTEL_TRACES_EXPORTER=none"
        )
    return True


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even what it lies in
        return False
