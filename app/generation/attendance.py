"""A client that waits for its requests, as long as it stays."""

import logging
import time
from collections.abc import Iterator
from typing import Any

from redis.exceptions import RedisError

from app.gateway.errors import ApiError
from app.gateway.events import events_of_all
from app.gateway.service import Service
from app.generation.submit import Accepted
from relay.log import event
from relay.request import Record, State, Token
from relay.tokens import End

log = logging.getLogger(__name__)

_STATUS_OF_ERROR = {"no_token_left": 400, "timeout": 504}


class Attendance:
    """Measures what its client sees, and cancels the requests when it leaves, unless they are to go on."""

    def __init__(self, service: Service, kind: str, accepted: Accepted, environ: dict[str, Any]) -> None:
        """`environ` is that of the client's WSGI request."""
        self.tokens = 0
        self._service = service
        self._kind = kind
        self._accepted = accepted
        self._environ = environ
        self._began = time.monotonic()
        self._running = len(accepted.request_ids)
        self._failed = False
        self._watches = service.follower.follow_all(accepted.request_ids)

    def events(self) -> Iterator[list[Token] | End | None]:
        """Of a request that is alone, as `app.events`. Raises ClientGone and ApiError."""
        for found in self.events_of_all():
            yield found[1] if found else None

    def events_of_all(self) -> Iterator[tuple[int, list[Token] | End] | None]:
        """As in `app.events`, by the place in `request_ids`. Raises ClientGone and ApiError."""
        meters, kind = self._service.meters, self._kind
        heard_at: dict[int, float] = {}
        for found in events_of_all(self._service, self._watches, self._environ):
            now = time.monotonic()
            if found is not None:
                number, item = found
                if isinstance(item, End):
                    self._running -= 1
                    self._failed |= item.state is not State.FINISHED
                    meters.whole_s.labels(kind, item.state.value).observe(now - self._began)
                elif number in heard_at:
                    meters.between_tokens_s.labels(kind).observe((now - heard_at[number]) / len(item))
                else:
                    meters.first_token_s.labels(kind).observe(now - self._began)
                if not isinstance(item, End):
                    heard_at[number] = now
                    self.tokens += len(item)
                    meters.streamed_tokens.inc(len(item))
            yield found

    def record(self) -> Record | None:
        """Of the first request. None: it cannot be read now."""
        try:
            return self._service.rooms.record(self._accepted.request_id)
        except RedisError:
            return None

    def cached_tokens(self) -> int | None:
        """Of all prompts, once their prefill is over. None: that cannot be read now."""
        try:
            records = [self._service.rooms.record(leader) for leader in self._accepted.leaders]
        except RedisError:
            return None
        return sum(record.cached_tokens for record in records if record)

    def leave(self) -> None:
        """Runs once the reply is over, complete or not."""
        self._watches.close()
        if not self._running or self._accepted.goes_on:
            return
        if not self._failed:
            self._service.meters.disconnects.inc()
        request_id = self._accepted.request_id
        try:
            self._service.rooms.cancel(*self._accepted.request_ids)
            why = "one_failed" if self._failed else "client_left"
            event(log, "cancelled", request=request_id, tokens=self.tokens, why=why)
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
