"""A client that waits for one request, as long as it stays."""

import logging
import time
from collections.abc import Iterator
from typing import Any

from redis.exceptions import RedisError

from app.errors import ApiError
from app.events import events
from app.service import Service
from app.submit import Accepted
from relay.log import event
from relay.request import Record, State, Token
from relay.tokens import End

log = logging.getLogger(__name__)

_STATUS_OF_ERROR = {"timeout": 504}


class Attendance:
    """Measures what its client sees, and cancels the request when it leaves, unless that is to go on."""

    def __init__(self, service: Service, kind: str, accepted: Accepted, environ: dict[str, Any]) -> None:
        """`environ` is that of the client's WSGI request."""
        self.tokens = 0
        self._service = service
        self._kind = kind
        self._accepted = accepted
        self._environ = environ
        self._began = time.monotonic()
        self._ended = False
        self._watch = service.follower.follow(accepted.request_id, 0)

    def events(self) -> Iterator[list[Token] | End | None]:
        """As `app.events`. Raises ClientGone and ApiError."""
        meters, kind = self._service.meters, self._kind
        heard_at = self._began
        for item in events(self._service, self._watch, self._environ):
            now = time.monotonic()
            if isinstance(item, list):
                if self.tokens == 0:
                    meters.first_token_s.labels(kind).observe(now - self._began)
                else:
                    meters.between_tokens_s.labels(kind).observe((now - heard_at) / len(item))
                heard_at = now
                self.tokens += len(item)
                meters.streamed_tokens.inc(len(item))
            elif isinstance(item, End):
                self._ended = True
                meters.whole_s.labels(kind, item.state.value).observe(now - self._began)
            yield item

    def record(self) -> Record | None:
        """None: it cannot be read now."""
        try:
            return self._service.rooms.record(self._accepted.request_id)
        except RedisError:
            return None

    def leave(self) -> None:
        """Runs once the reply is over, complete or not."""
        self._watch.close()
        if self._ended or self._accepted.goes_on:
            return
        self._service.meters.disconnects.inc()
        request_id = self._accepted.request_id
        try:
            self._service.rooms.cancel(request_id)
            event(log, "client_left", request=request_id, tokens=self.tokens)
        except RedisError as error:
            event(log, "cancel_failed", logging.WARNING, request=request_id, error=error)


def refuse_failure(end: End) -> None:
    """Raises ApiError unless the request finished."""
    if end.state is State.CANCELLED:
        raise ApiError(499, "The request was cancelled.", code="cancelled")
    if end.state is State.FAILED:
        code = end.error_code or "failed"
        raise ApiError(_STATUS_OF_ERROR.get(code, 500), end.error_message or "The request failed.", code=code)


def client_left() -> ApiError:
    return ApiError(499, "The client closed the connection.", code="client_gone")
