"""A response as its client sees it: the object, and the events of its stream."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from app.generation.logprobs import chat_logprobs
from app.response.response_output import Object, ResponseOutput, Told
from app.tools.tool_reply import ToolReply
from relay.request import Record, State, Token
from relay.responses import StoredResponse
from relay.tokenizer import Tokenizer
from relay.tokens import End


class Event(NamedTuple):
    """`number` counts the events of one response, alike each time it is told."""

    number: int
    name: str
    data: Object


class ResponseView:
    """Tells one response, from its tokens alone: so every gateway tells it alike, at any time."""

    def __init__(
        self,
        stored: StoredResponse,
        model: str,
        tokenizer: Tokenizer,
        new_tools: Callable[[], ToolReply | None],
    ) -> None:
        """`new_tools` makes what finds the calls in an answer; None where it may hold none."""
        self._stored = stored
        self._model = model
        self._tokenizer = tokenizer
        self._new_tools = new_tools
        self._output = self._new_output()
        self._events = 0
        self._queued = stored.background

    # ---- the object

    def waiting(self, record: Record | None = None) -> Object:
        """Before its end."""
        queued = record is None or record.state is State.QUEUED
        return self._object("queued" if queued and self._stored.background else "in_progress")

    def ended(self, tokens: Sequence[Token], end: End, record: Record | None) -> Object:
        """`record` None: it cannot be read now, so nobody knows how much of the prompt was cached."""
        output = self._new_output()
        for token in tokens:
            output.token(token)
        output.end(end)
        return self._ended(output, end, record)

    # ---- the stream

    @property
    def next_number(self) -> int:
        """Of the event that comes next."""
        return self._events

    def begin(self) -> list[Event]:
        """What is told at once."""
        waiting = {"response": self.waiting()}
        second = Told("queued", waiting) if self._queued else self._in_progress()
        return self._numbered([Told("created", waiting), second])

    def token(self, token: Token) -> list[Event]:
        return self._numbered([*self._leave_queue(), *self._output.token(token)])

    def end(self, end: End, record: Record | None) -> list[Event]:
        told = [*self._leave_queue(), *self._output.end(end)]
        whole = self._ended(self._output, end, record)
        return self._numbered([*told, Told(whole["status"], {"response": whole})])

    def _leave_queue(self) -> list[Told]:
        if not self._queued:
            return []
        self._queued = False
        return [self._in_progress()]

    def _in_progress(self) -> Told:
        return Told("in_progress", {"response": self._object("in_progress")})

    def _numbered(self, told: Iterable[Told]) -> list[Event]:
        events = []
        for name, fields in told:
            full_name = f"response.{name}"
            data = {"type": full_name, "sequence_number": self._events, **fields}
            events.append(Event(self._events, full_name, data))
            self._events += 1
        return events

    # ---- parts

    def _new_output(self) -> ResponseOutput:
        hex_id = self._stored.response_id.removeprefix("resp_")
        return ResponseOutput(hex_id, self._new_tools(), self._logprobs)

    def _logprobs(self, tokens: Sequence[Token]) -> list[Object]:
        wanted = self._stored.top_logprobs
        if wanted is None:
            return []
        content: list[Object] = chat_logprobs(tokens, wanted, self._tokenizer)["content"]
        return content

    def _ended(self, output: ResponseOutput, end: End, record: Record | None) -> Object:
        status = _status(end)
        shown = self._object(status) | {"output": output.items}
        if status == "completed":
            shown["completed_at"] = int(record.timings.ended / 1000) if record else None
        if status == "incomplete":
            shown["incomplete_details"] = {"reason": "max_output_tokens"}
        if status == "failed":
            message = end.error_message or "The request failed."
            shown["error"] = {"code": "server_error", "message": message}
        if record:
            shown["usage"] = _usage(record)
        return shown

    def _object(self, status: str) -> Object:
        stored = self._stored
        fields: dict[str, Any] = {
            "id": stored.response_id,
            "object": "response",
            "created_at": stored.created,
            "completed_at": None,
            "status": status,
            "background": stored.background,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": [],
            "usage": None,
        }
        return fields | stored.echo


def _status(end: End) -> str:
    if end.state is State.FINISHED:
        return "incomplete" if end.finish_reason == "length" else "completed"
    return "cancelled" if end.state is State.CANCELLED else "failed"


def _usage(record: Record) -> Object:
    return {
        "input_tokens": record.prompt_tokens,
        "input_tokens_details": {"cached_tokens": record.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": record.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": record.prompt_tokens + record.completion_tokens,
    }
