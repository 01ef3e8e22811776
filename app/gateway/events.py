"""What happens to a request, as one client sees it: tokens as they come, and the end."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from redis.exceptions import RedisError

from app.gateway.client import ClientGone
from app.gateway.errors import ApiError
from app.gateway.follow import ClientLeft, Inbox, RedisBack, StreamDiverged, Watch, Watches
from app.gateway.line import KEY, Line
from app.gateway.service import Service
from app.gateway.sse import HEARTBEAT_S
from relay.request import Token
from relay.tokens import End

_LINE_TICK_S = 0.5  # nobody tells of a line that it was abandoned


def events(service: Service, watch: Watch, environ: dict[str, Any]) -> Iterator[list[Token] | End | None]:
    """Yields tokens, None after each heartbeat without any, and the end last.

    Raises ClientGone, and ApiError when the stream cannot be completed as it was begun.
    """
    for found in _events(service, watch.inbox, [watch.request_id], environ):
        yield found[1] if found else None


def events_of_all(
    service: Service, watches: Watches, environ: dict[str, Any]
) -> Iterator[tuple[int, list[Token] | End] | None]:
    """As `events`, of several streams: each item comes with the number of its stream, and each has an end."""
    yield from _events(service, watches.inbox, watches.request_ids, environ)


def _events(
    service: Service, inbox: Inbox, request_ids: Sequence[str], environ: dict[str, Any]
) -> Iterator[tuple[int, list[Token] | End] | None]:
    with service.departures.watching(environ, inbox.leave):
        yield from _until_all_ended(service, inbox, request_ids, environ.get(KEY))


def _until_all_ended(
    service: Service, inbox: Inbox, request_ids: Sequence[str], line: Line | None
) -> Iterator[tuple[int, list[Token] | End] | None]:
    heard_at = time.monotonic()
    running = dict(enumerate(request_ids))
    terminal: set[int] = set()  # of them, whose record has ended
    while running:
        left_s = heard_at + HEARTBEAT_S - time.monotonic()
        try:
            found = inbox.take(left_s if line is None else min(left_s, _LINE_TICK_S))
        except StreamDiverged as error:
            raise ApiError(500, str(error), code="stream_diverged") from error
        if line is not None and line.abandoned():
            raise ClientGone
        now = time.monotonic()
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
        if isinstance(item, ClientLeft):
            raise ClientGone
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
