"""One request followed to its end for an OpenAI client that stays connected: streamed or whole."""

import logging
import time
from collections.abc import Iterator
from typing import Any, Protocol

from flask import Response, jsonify, request
from redis.exceptions import RedisError

from app.client import ClientGone
from app.errors import ApiError
from app.events import events
from app.schema import StreamOptions
from app.service import Service
from app.sse import DONE, PING, event_stream, frame
from app.submit import Accepted
from app.view import usage
from relay.log import event
from relay.request import State, Token
from relay.tokens import End

log = logging.getLogger(__name__)

_STATUS_OF_ERROR = {"timeout": 504}


class View(Protocol):
    """How one API resource shows tokens. Each method returns one entry of `choices`, or None for no chunk."""

    kind: str
    id_prefix: str
    whole_object: str
    chunk_object: str

    def first(self) -> dict[str, Any] | None: ...

    def token(self, token: Token) -> dict[str, Any]: ...

    def last(self, end: End) -> dict[str, Any]: ...

    def whole(self, tokens: list[Token], end: End) -> dict[str, Any]: ...


class Generation:
    """Cancels the request when its client leaves, unless it came with a key: then a retry finds it."""

    def __init__(self, service: Service, accepted: Accepted, view: View) -> None:
        self._service = service
        self._accepted = accepted
        self._view = view
        self._created = int(time.time())
        self._began = time.monotonic()
        self._tokens = 0
        self._ended = False
        self._environ = request.environ
        self._watch = service.follower.follow(accepted.request_id, 0)

    def answer(self, stream: bool, options: StreamOptions | None) -> Response:
        if stream:
            return event_stream(self._frames(options or StreamOptions()), self.leave)
        try:
            return self._whole()
        finally:
            self.leave()

    def leave(self) -> None:
        """Runs once the reply is over, complete or not."""
        self._watch.close()
        if self._ended or self._accepted.goes_on:
            return
        self._service.meters.disconnects.inc()
        request_id = self._accepted.request_id
        try:
            self._service.rooms.cancel(request_id)
            event(log, "client_left", request=request_id, tokens=self._tokens)
        except RedisError as error:
            event(log, "cancel_failed", logging.WARNING, request=request_id, error=error)

    def _whole(self) -> Response:
        tokens: list[Token] = []
        try:
            for item in self._events():
                if isinstance(item, list):
                    tokens += item
                elif isinstance(item, End):
                    self._refuse_failure(item)
                    reply = self._chunk(self._view.whole_object, [self._view.whole(tokens, item)])
                    return jsonify(reply | {"usage": self._usage(final=True)})
        except ClientGone:
            pass
        return ApiError(499, "The client closed the connection.", code="client_gone").response()

    def _frames(self, options: StreamOptions) -> Iterator[str]:
        try:
            if first := self._view.first():
                yield self._frame(first, options)
            for item in self._events():
                if item is None:
                    yield PING
                elif isinstance(item, End):
                    self._refuse_failure(item)
                    yield self._frame(self._view.last(item), options)
                else:
                    yield "".join([self._token_frame(token, options) for token in item])
            if options.include_usage:
                yield frame(self._chunk(self._view.chunk_object, []) | {"usage": self._usage(final=True)})
        except ClientGone:
            return
        except ApiError as error:
            yield frame(error.body())
        yield DONE

    def _events(self) -> Iterator[list[Token] | End | None]:
        meters, kind = self._service.meters, self._view.kind
        heard_at = self._began
        for item in events(self._service, self._watch, self._environ):
            now = time.monotonic()
            if isinstance(item, list):
                if self._tokens == 0:
                    meters.first_token_s.labels(kind).observe(now - self._began)
                else:
                    meters.between_tokens_s.labels(kind).observe((now - heard_at) / len(item))
                heard_at = now
                self._tokens += len(item)
                meters.streamed_tokens.inc(len(item))
            elif isinstance(item, End):
                self._ended = True
                meters.whole_s.labels(kind, item.state.value).observe(now - self._began)
            yield item

    def _refuse_failure(self, end: End) -> None:
        """Raises ApiError unless the request finished."""
        if end.state is State.CANCELLED:
            raise ApiError(499, "The request was cancelled.", code="cancelled")
        if end.state is State.FAILED:
            code = end.error_code or "failed"
            raise ApiError(
                _STATUS_OF_ERROR.get(code, 500), end.error_message or "The request failed.", code=code
            )

    def _token_frame(self, token: Token, options: StreamOptions) -> str:
        return self._frame(self._view.token(token), options)

    def _frame(self, choice: dict[str, Any], options: StreamOptions) -> str:
        chunk = self._chunk(self._view.chunk_object, [choice])
        if options.continuous_usage_stats:
            chunk["usage"] = self._usage(final=False)
        elif options.include_usage:
            chunk["usage"] = None
        return frame(chunk)

    def _chunk(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{self._view.id_prefix}{self._accepted.request_id}",
            "object": kind,
            "created": self._created,
            "model": self._service.model,
            "choices": choices,
        }

    def _usage(self, final: bool) -> dict[str, Any]:
        """Only the record knows how much of the prompt was cached, and only when prefill is over."""
        cached = None
        if final:
            try:
                record = self._service.rooms.record(self._accepted.request_id)
                cached = record.cached_tokens if record else None
            except RedisError:
                pass
        return usage(self._accepted.prompt_tokens, self._tokens, cached)
