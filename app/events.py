"""What happens to a request, as one client sees it: tokens as they come, and the end."""

import time
from collections.abc import Iterator
from typing import Any

from redis.exceptions import RedisError

from app.client import ClientGone, client_gone
from app.errors import ApiError
from app.follow import RedisBack, StreamDiverged, Watch
from app.service import Service
from app.sse import HEARTBEAT_S
from relay.request import Token
from relay.tokens import End

TICK_S = 0.5


def events(service: Service, watch: Watch, environ: dict[str, Any]) -> Iterator[list[Token] | End | None]:
    """Yields tokens, None after each heartbeat without any, and the end last.

    Raises ClientGone, and ApiError when the stream cannot be completed as it was begun.
    """
    heard_at = looked_at = time.monotonic()
    terminal = False
    while True:
        try:
            item = watch.take(TICK_S)
        except StreamDiverged as error:
            raise ApiError(500, str(error), code="stream_diverged") from error
        now = time.monotonic()
        if now - looked_at >= TICK_S:
            looked_at = now
            if client_gone(environ):
                raise ClientGone
        if isinstance(item, list):
            heard_at = now
            yield item
        elif isinstance(item, End):
            yield item
            return
        elif (back := isinstance(item, RedisBack)) or now - heard_at >= HEARTBEAT_S:
            ended = _has_ended(service, watch.request_id)
            # A reader that only begins again has not had the time to come to the end.
            if ended and terminal and not back:
                raise ApiError(
                    500, "The end of this stream is lost; the request itself has ended.", code="stream_lost"
                )
            terminal, heard_at = ended, time.monotonic()
            yield None


def _has_ended(service: Service, request_id: str) -> bool:
    """Raises ApiError when Redis has forgotten the request."""
    try:
        record = service.rooms.record(request_id)
    except RedisError:
        return False
    if record is None:
        raise ApiError(500, "Redis lost this request: send it again.", code="request_lost")
    return record.state.terminal
