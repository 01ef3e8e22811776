"""One request followed to its end for an OpenAI client that stays connected: streamed or whole."""

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from flask import Response, jsonify, request

from app.fields.schema import StreamOptions
from app.gateway.client import ClientGone
from app.gateway.errors import ApiError
from app.gateway.service import Service
from app.gateway.sse import DONE, PING, event_stream, frame
from app.generation.attendance import Attendance, client_left, refuse_failure
from app.generation.best_of import Sample, chosen
from app.generation.chunk_counts import ChunkCounts
from app.generation.submit import Accepted
from app.generation.view import usage
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
    """The answer to a client that stays, in chunks or whole."""

    def __init__(self, service: Service, accepted: Accepted, new_view: Callable[[int], View], n: int) -> None:
        """`new_view` makes the view of one sample, by its place in `request_ids`. Of more than `n` of a
        prompt the best are shown."""
        self._service = service
        self._accepted = accepted
        self._n = n
        self._views = [new_view(index) for index in range(len(accepted.request_ids))]
        self._view = self._views[0]
        self._counts = ChunkCounts(len(self._views), accepted.goes_on)  # of chunks beside the first ones
        self._attendance = Attendance(service, self._view.kind, accepted, request.environ)
        self._created = self._when()

    def answer(self, stream: bool, options: StreamOptions | None) -> Response:
        if stream:
            return event_stream(self._frames(options or StreamOptions()), self._attendance.leave)
        try:
            return self._whole()
        finally:
            self._attendance.leave()

    def _when(self) -> int:
        """When it was accepted, so that a repeat with the same key has the same bytes."""
        record = self._attendance.record() if self._accepted.goes_on else None
        return int(record.timings.submitted / 1000 if record else time.time())

    def _whole(self) -> Response:
        samples = [Sample([], None) for _ in self._views]
        try:
            for found in self._attendance.events_of_all():
                if found is None:
                    continue
                index, item = found
                if isinstance(item, End):
                    refuse_failure(item)
                    samples[index] = samples[index]._replace(end=item)
                else:
                    samples[index].tokens.extend(item)
        except ClientGone:
            return client_left().response()
        choices: list[dict[str, Any]] = []
        for index in chosen(samples, self._accepted.samples, self._n):
            tokens, end = samples[index]
            assert end is not None
            choices.append(self._views[index].whole(tokens, end) | {"index": len(choices)})
        reply = self._chunk(self._view.whole_object, choices)
        return jsonify(reply | {"usage": self._usage(final=True)} | self._view.about_prompt())

    def _frames(self, options: StreamOptions) -> Iterator[str]:
        try:
            if firsts := self._first_frames(options):
                yield firsts
            for found in self._attendance.events_of_all():
                if found is None:
                    yield PING
                    continue
                index, item = found
                view = self._views[index]
                if isinstance(item, End):
                    refuse_failure(item)
                    yield self._next_frame(index, view.last(item), options)
                else:
                    yield "".join([self._next_frame(index, view.token(token), options) for token in item])
            self._counts.check_end()
            if options.include_usage:
                yield frame(self._chunk(self._view.chunk_object, []) | {"usage": self._usage(final=True)})
        except ClientGone:
            return
        except ApiError as error:
            yield frame(error.body())
        yield DONE

    def _first_frames(self, options: StreamOptions) -> str:
        """The first chunk of each choice; that of the last one tells that the client has all of them."""
        frames = [
            self._frame(index, first, options, None if index else view.about_prompt())
            for index, view in enumerate(self._views)
            if (first := view.first())
        ]
        if not frames or self._counts.resumed:
            return ""
        return "".join([*frames[:-1], self._counts.name(), frames[-1]])

    def _next_frame(self, index: int, choice: dict[str, Any], options: StreamOptions) -> str:
        """Nothing if the client has it."""
        if not self._counts.count(index):
            return ""
        return self._counts.name() + self._frame(index, choice, options)

    def _frame(
        self, index: int, choice: dict[str, Any], options: StreamOptions, about: dict[str, Any] | None = None
    ) -> str:
        chunk = self._chunk(self._view.chunk_object, [choice | {"index": index}]) | (about or {})
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
        cached = self._attendance.cached_tokens() if final else None
        return usage(self._accepted.prompt_tokens, self._attendance.tokens, cached)
