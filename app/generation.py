"""One request followed to its end for an OpenAI client that stays connected: streamed or whole."""

import time
from collections.abc import Iterator
from typing import Any, Protocol

from flask import Response, jsonify, request

from app.arguments import last_event
from app.attendance import Attendance, client_left, refuse_failure
from app.client import ClientGone
from app.errors import ApiError
from app.schema import StreamOptions
from app.service import Service
from app.sse import DONE, PING, event_stream, frame
from app.submit import Accepted
from app.view import usage
from relay.request import Token
from relay.tokens import End


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

    def about_prompt(self) -> dict[str, Any]:
        """Fields beside `choices`, of the whole reply or the first chunk."""
        ...


class Generation:
    """The answer to a client that stays, in chunks or whole.

    Where the request has a key, chunks are numbered: its client may come again for those it has not seen.
    Others are not, since clients that expect `data:` at the beginning of each event would lose them.
    """

    def __init__(self, service: Service, accepted: Accepted, view: View) -> None:
        self._service = service
        self._accepted = accepted
        self._view = view
        self._created = int(time.time())
        self._numbered = accepted.goes_on
        self._seen = last_event()
        self._attendance = Attendance(service, view.kind, accepted, request.environ)

    def answer(self, stream: bool, options: StreamOptions | None) -> Response:
        if stream:
            return event_stream(self._frames(options or StreamOptions()), self._attendance.leave)
        try:
            return self._whole()
        finally:
            self._attendance.leave()

    def _whole(self) -> Response:
        tokens: list[Token] = []
        try:
            for item in self._attendance.events():
                if isinstance(item, list):
                    tokens += item
                elif isinstance(item, End):
                    refuse_failure(item)
                    reply = self._chunk(self._view.whole_object, [self._view.whole(tokens, item)])
                    about = self._view.about_prompt()
                    return jsonify(reply | {"usage": self._usage(final=True)} | about)
        except ClientGone:
            pass
        return client_left().response()

    def _frames(self, options: StreamOptions) -> Iterator[str]:
        try:
            if first := self._view.first():
                yield self._unseen(0, self._frame(first, options, self._view.about_prompt()))
            for item in self._attendance.events():
                if item is None:
                    yield PING
                elif isinstance(item, End):
                    refuse_failure(item)
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

    def _token_frame(self, token: Token, options: StreamOptions) -> str:
        return self._unseen(token.position + 1, self._frame(self._view.token(token), options))

    def _unseen(self, number: int, text: str) -> str:
        """A chunk with its number; nothing if the client has it."""
        if self._seen is not None and number <= self._seen:
            return ""
        return f"id: {number}\n{text}" if self._numbered else text

    def _frame(
        self, choice: dict[str, Any], options: StreamOptions, about: dict[str, Any] | None = None
    ) -> str:
        chunk = self._chunk(self._view.chunk_object, [choice]) | (about or {})
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
        record = self._attendance.record() if final else None
        cached = record.cached_tokens if record else None
        return usage(self._accepted.prompt_tokens, self._attendance.tokens, cached)
