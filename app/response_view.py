"""A response as its client sees it: the object, and the events of its stream."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from app.logprobs import chat_logprobs
from relay.request import Record, State, Token
from relay.responses import StoredResponse
from relay.tokenizer import Tokenizer
from relay.tokens import End

Object = dict[str, Any]


class Event(NamedTuple):
    """`number` counts the events of one response, alike each time it is told."""

    number: int
    name: str
    data: Object


class ResponseView:
    """Tells one response, from its tokens alone: so every gateway tells it alike, at any time."""

    def __init__(self, stored: StoredResponse, model: str, tokenizer: Tokenizer) -> None:
        self._stored = stored
        self._model = model
        self._tokenizer = tokenizer
        self._item_id = f"msg_{stored.response_id.removeprefix('resp_')}"
        self._events = 0
        self._began = False
        self._tokens: list[Token] = []

    # ---- the object

    def waiting(self, record: Record | None = None) -> Object:
        """Before its end."""
        queued = record is None or record.state is State.QUEUED
        return self._object("queued" if queued and self._stored.background else "in_progress")

    def ended(self, tokens: Sequence[Token], end: End, record: Record | None) -> Object:
        """`record` None: it cannot be read now, so nobody knows how much of the prompt was cached."""
        status = _status(end)
        output = [self._item(tokens, end, _item_status(status))] if _has_output(tokens, end) else []
        shown = self._object(status) | {"output": output}
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

    # ---- the stream

    @property
    def next_number(self) -> int:
        """Of the event that comes next."""
        return self._events

    def begin(self) -> list[Event]:
        if not self._stored.background:
            return [self._event("created", response=self.waiting()), self._in_progress()]
        waiting = self.waiting()
        return [self._event("created", response=waiting), self._event("queued", response=waiting)]

    def token(self, token: Token) -> list[Event]:
        self._tokens.append(token)
        logprobs = self._logprobs([token])
        return [
            *self._open(),
            self._event("output_text.delta", **self._place(), delta=token.text, logprobs=logprobs),
        ]

    def end(self, end: End, record: Record | None) -> list[Event]:
        events = []
        whole = self.ended(self._tokens, end, record)
        if _has_output(self._tokens, end):
            events = self._open()
            if end.text:
                events.append(self._event("output_text.delta", **self._place(), delta=end.text, logprobs=[]))
            (item,) = whole["output"]
            (part,) = item["content"]
            events += [
                self._event(
                    "output_text.done", **self._place(), text=part["text"], logprobs=part["logprobs"]
                ),
                self._event("content_part.done", **self._place(), part=part),
                self._event("output_item.done", output_index=0, item=item),
            ]
        elif self._stored.background:
            events = [self._in_progress()]
        return [*events, self._event(whole["status"], response=whole)]

    def _open(self) -> list[Event]:
        if self._began:
            return []
        self._began = True
        first = [self._in_progress()] if self._stored.background else []
        item = self._message("in_progress", [])
        part = _part("", [])
        return [
            *first,
            self._event("output_item.added", output_index=0, item=item),
            self._event("content_part.added", **self._place(), part=part),
        ]

    def _in_progress(self) -> Event:
        return self._event("in_progress", response=self._object("in_progress"))

    def _event(self, name: str, **fields: Any) -> Event:
        number, full_name = self._events, f"response.{name}"
        self._events += 1
        return Event(number, full_name, {"type": full_name, "sequence_number": number, **fields})

    # ---- parts

    def _place(self) -> Object:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _item(self, tokens: Sequence[Token], end: End, status: str) -> Object:
        text = "".join(token.text for token in tokens) + end.text
        return self._message(status, [_part(text, self._logprobs(tokens))])

    def _message(self, status: str, content: list[Object]) -> Object:
        return {
            "id": self._item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _logprobs(self, tokens: Sequence[Token]) -> list[Object]:
        wanted = self._stored.top_logprobs
        if wanted is None:
            return []
        content: list[Object] = chat_logprobs(tokens, wanted, self._tokenizer)["content"]
        return content

    def _object(self, status: str) -> Object:
        stored = self._stored
        return {
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
            **stored.echo,
        }


def _part(text: str, logprobs: list[Object]) -> Object:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _status(end: End) -> str:
    if end.state is State.FINISHED:
        return "incomplete" if end.finish_reason == "length" else "completed"
    return "cancelled" if end.state is State.CANCELLED else "failed"


def _item_status(status: str) -> str:
    return "completed" if status == "completed" else "incomplete"


def _has_output(tokens: Sequence[Token], end: End) -> bool:
    return bool(tokens or end.text) or end.state is State.FINISHED


def _usage(record: Record) -> Object:
    return {
        "input_tokens": record.prompt_tokens,
        "input_tokens_details": {"cached_tokens": record.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": record.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": record.prompt_tokens + record.completion_tokens,
    }
