"""What happens to a request, as one client sees it: tokens as they come, and the end."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from redis.exceptions import RedisError

from app.gateway.client import ClientGone, client_gone
from app.gateway.errors import ApiError
from app.gateway.follow import Item, RedisBack, StreamDiverged, Watch, Watches
from app.gateway.service import Service
from app.gateway.sse import HEARTBEAT_S
from relay.request import Token
from relay.tokens import End

TICK_S = 0.5


def events(service: Service, watch: Watch, environ: dict[str, Any]) -> Iterator[list[Token] | End | None]:
    """Yields tokens, None after each heartbeat without any, and the end last.

    Raises ClientGone, and ApiError when the stream cannot be completed as it was begun.
    """
    for found in _events(service, watch.inbox.take, [watch.request_id], environ):
        yield found[1] if found else None


def events_of_all(
    service: Service, watches: Watches, environ: dict[str, Any]
) -> Iterator[tuple[int, list[Token] | End] | None]:
    """As `events`, of several streams: each item comes with the number of its stream, and each has an end."""
    yield from _events(service, watches.take, watches.request_ids, environ)


def _events(
    service: Service,
    take: Callable[[float], tuple[int, Item] | None],
    request_ids: Sequence[str],
    environ: dict[str, Any],
) -> Iterator[tuple[int, list[Token] | End] | None]:
    heard_at = looked_at = time.monotonic()
    running = dict(enumerate(request_ids))
    terminal: set[int] = set()  # of them, whose record has ended
    while running:
        try:
            found = take(TICK_S)
        except StreamDiverged as error:
            raise ApiError(500, str(error), code="stream_diverged") from error
        now = time.monotonic()
        if now - looked_at >= TICK_S:
            looked_at = now
            if client_gone(environ):
                raise ClientGone
        if found is None:
            if now - heard_at < HEARTBEAT_S:
                continue
            ended = {number for number, request_id in running.items() if _has_ended(service, request_id)}
            if ended & terminal:
                raise ApiError(
                    500, "The end of this stream is lost; the request itself has ended.", code="stream_lost"
                )
            terminal, heard_at = ended, time.monotonic()
            yield None
            continue
        number, item = found
        heard_at = now
        if isinstance(item, RedisBack):
            # A reader that only begins again has not had the time to come to the end.
            terminal.discard(number)
            if _has_ended(service, running[number]):
                terminal.add(number)
            yield None
            continue
        if isinstance(item, End):
            del running[number]
        yield number, item


def _has_ended(service: Service, request_id: str) -> bool:
    """Raises ApiError when Redis has forgotten the request."""
    try:
        state = service.rooms.state(request_id)
    except RedisError:
        return False
    if state is None:
        raise ApiError(500, "Redis lost this request: send it again.", code="request_lost")
    return state.terminal
