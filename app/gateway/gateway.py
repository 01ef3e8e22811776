"""The HTTP gateway: a Flask app that reads and writes Redis and rings Celery."""

import logging
import re
import time
import uuid
from collections.abc import Callable

from flask import Flask, Response, g, request
from flask_cors import CORS

from app.api import (
    batches,
    cache,
    chat,
    completions,
    console,
    files,
    generate,
    health,
    info,
    metrics,
    models,
    pools,
    requests,
    responses,
    tokenization,
)
from app.gateway import access, errors
from app.gateway.client import Departures
from app.gateway.cluster import cluster_registry
from app.gateway.follow import Follower
from app.gateway.keys import KeyRing
from app.gateway.line import current_line
from app.gateway.meters import Meters
from app.gateway.readiness import Readiness
from app.gateway.recent import Recent, is_watching
from app.gateway.service import KEY, Service, service
from app.gateway.storage import Storage
from app.openapi import openapi
from app.tracing.tracing import tracing
from relay.batches import Batches
from relay.files import Files
from relay.grammar import Grammars
from relay.log import event
from relay.model_card import read_model_card
from relay.redis_client import probe_client
from relay.request import Ring
from relay.responses import Responses
from relay.rooms import Rooms
from relay.settings import Settings
from relay.token_feed import TokenFeed
from relay.tokenizer import Tokenizer
from relay.tokens import TokenReader
from relay.trace_context import TraceContext

log = logging.getLogger(__name__)

RESOURCES = (
    requests,
    completions,
    chat,
    generate,
    responses,
    files,
    batches,
    models,
    tokenization,
    pools,
    info,
    cache,
    health,
    metrics,
    openapi,
    console,
)
_PROBE_TIMEOUT_S = 0.2
_TRACE = re.compile(r"[\x21-\x7e]{1,128}")
_QUIET = ("/health", "/ready", "/ping", "/metrics", "/metrics/cluster", "/metrics/targets", "/v1/pools")


def create_app(
    settings: Settings, ring: Callable[[Ring], object] | None = None, role: str = "gateway"
) -> Flask:
    """The WSGI app. `ring` sends a doorbell, by default through Celery. `role` is what metrics call this.

    Starts a thread, so call it after any fork. Raises ModelError when the model cannot be served.
    """
    app = Flask("kvrelay")
    app.config["MAX_CONTENT_LENGTH"] = settings.max_body_bytes
    app.json.sort_keys = False  # type: ignore[attr-defined]
    app.extensions[KEY] = _service(settings, ring or _celery_ring(), role)
    errors.install(app)
    app.before_request(_begin)
    app.before_request(access.identify)
    app.after_request(_end)
    if origins := settings.cors_origins.split():
        CORS(app, origins=origins, expose_headers=["X-Request-Id", "Retry-After", "Location"])
    for module in RESOURCES:
        app.register_blueprint(module.resource)
    return app


def _service(settings: Settings, ring: Callable[[Ring], object], role: str) -> Service:
    card = read_model_card(settings.model_path)
    tokenizer = Tokenizer.load(settings.model_path)
    rooms = Rooms(settings.redis_url, settings.model_name, settings.result_ttl_s * 1000)
    all_batches = Batches(rooms.redis, rooms.root, rooms.protocol)
    follower = Follower(TokenFeed(settings.redis_url, settings.model_name))
    probe = probe_client(settings.redis_url, _PROBE_TIMEOUT_S)
    return Service(
        settings=settings,
        model=settings.model_name,
        context_tokens=settings.context_tokens or card.context_length_tokens,
        started=int(time.time()),
        tokenizer=tokenizer,
        grammars=Grammars(tokenizer, tokenizer.vocab_size),
        rooms=rooms,
        tokens=TokenReader(settings.redis_url, settings.model_name),
        follower=follower,
        departures=Departures(),
        meters=Meters(settings.model_name, role, follower),
        cluster=cluster_registry(rooms, all_batches, probe, settings.model_name),
        keys=KeyRing.from_settings(settings),
        storage=Storage(settings),
        files=Files(rooms.redis, rooms.root),
        batches=all_batches,
        responses=Responses(rooms.redis, rooms.root),
        recent=Recent(),
        readiness=Readiness(probe, rooms.workers),
        tracing=tracing(rooms, settings.model_name),
        probe=probe,
        ring=ring,
    )


def _celery_ring() -> Callable[[Ring], object]:
    from relay.celery import ring

    return ring


def _begin() -> None:
    trace = request.headers.get("X-Request-Id", "")
    g.trace = trace if _TRACE.fullmatch(trace) else uuid.uuid4().hex
    traceparent, tracestate = request.headers.get("traceparent", ""), request.headers.getlist("tracestate")
    g.context = TraceContext.received(traceparent, ",".join(tracestate)) or TraceContext.new()
    g.began = time.monotonic()


def _end(response: Response) -> Response:
    response.headers["X-Request-Id"] = g.trace
    route = request.url_rule.rule if request.url_rule else "unknown"
    service().meters.http_requests.labels(route, response.status_code).inc()
    event(
        log,
        "http",
        logging.DEBUG if _is_quiet() else logging.INFO,
        method=request.method,
        route=route,
        status=response.status_code,
        ms=1000 * (time.monotonic() - g.began),
        trace=g.trace,
        trace_id=g.context.trace_id,
    )
    return response


def _is_quiet() -> bool:
    """What is asked all the time, and lines of batches."""
    asked_often = request.path in _QUIET or is_watching() or request.path.startswith("/console/")
    return asked_often or current_line() is not None
