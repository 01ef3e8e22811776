"""Server-sent events: frames and the response that carries them."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from flask import Response

# Bytes to a silent client, so that proxies keep the connection and a closed one is noticed.
HEARTBEAT_S = 5.0
# An empty line: clients that trim what arrives, as vLLM's benchmark does, glue a comment to the next event.
PING = "\n"
DONE = "data: [DONE]\n\n"


def frame(data: Any, *, event: str | None = None, event_id: int | None = None) -> str:
    """One event with `data` as one line of JSON."""
    named = f"event: {event}\n" if event is not None else ""
    numbered = f"id: {event_id}\n" if event_id is not None else ""
    return f"{numbered}{named}data: {json.dumps(data, separators=(',', ':'))}\n\n"


def event_stream(frames: Iterator[str], on_close: Callable[[], None]) -> Response:
    """`on_close` runs when the response ends, in whatever way, also if no frame was ever asked for."""
    response = Response(frames, content_type="text/event-stream; charset=utf-8")
    response.headers["Cache-Control"] = "no-cache"
    response.headers["X-Accel-Buffering"] = "no"
    response.call_on_close(on_close)
    return response
