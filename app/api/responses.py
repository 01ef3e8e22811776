"""/v1/responses: answers to a conversation that is remembered: at once, streamed, or in background."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flask import Blueprint, Response, jsonify, request

from app.api.chat import tool_reply
from app.fields.prompt import prompt_of_conversation
from app.fields.schema import ChatBody
from app.fields.unsupported import unsupported
from app.gateway.access import caller
from app.gateway.arguments import choice_argument, last_event, switch_argument, whole_argument
from app.gateway.client import ClientGone
from app.gateway.errors import ApiError, invalid, position_ahead
from app.gateway.events import events
from app.gateway.line import current_line
from app.gateway.page import page
from app.gateway.service import Service, service
from app.gateway.sse import PING, event_stream, frame
from app.generation.attendance import Attendance, client_left, refuse_failure
from app.generation.submit import Accepted, current_body, submit
from app.response.response_body import (
    LOGPROBS,
    ResponseBody,
    as_chat,
    as_chat_of_tools,
    check_included,
    in_terms_of_a_response,
    parse_response,
)
from app.response.response_items import Item, items_of
from app.response.response_output import Object
from app.response.response_view import Event, ResponseView
from relay.request import Record, Token
from relay.responses import StoredResponse
from relay.tokens import End

resource = Blueprint("responses", __name__)

KIND = "response"
MAX_PAGE = 100
_RESPONSE_ID = re.compile(r"resp_[0-9a-f]{32}")
_MOST_EVENTS = 1 << 31


@resource.post("/v1/responses")
def create() -> Response:
    raw = current_body()
    body = parse_response(raw.fields)
    s = service()
    seen = _last_seen()
    if body.stream or not body.background:
        s.check_free_thread()
    items = [*_conversation_before(s, body.previous_response_id), *items_of(body.input)]
    with in_terms_of_a_response():
        chat = as_chat(body, raw.fields, items)
        accepted = submit(s, KIND, chat, prompt_of_conversation(s, chat), raw.digest)
    stored = _stored(s, accepted, body, chat, items)
    if body.store and not current_line():
        s.responses.add(stored, s.settings.request_timeout_s + s.settings.result_ttl_s)
    view = _view(s, stored)
    if body.background and not body.stream:
        return jsonify(view.waiting())
    if body.background:
        accepted = accepted._replace(goes_on=True)
    attendance = Attendance(s, KIND, accepted, request.environ)
    if body.stream:
        frames = _frames(view, attendance.events(), attendance.record, seen)
        return event_stream(frames, attendance.leave)
    try:
        return jsonify(_whole(view, attendance))
    except ClientGone:
        return client_left().response()
    finally:
        attendance.leave()


@resource.get("/v1/responses/<response_id>")
def show(response_id: str) -> Response:
    s = service()
    stored, record = _find(s, response_id)
    _refuse_arguments(stored)
    if switch_argument("stream"):
        return _told_again(s, stored)
    return jsonify(_object(s, stored, record))


@resource.post("/v1/responses/<response_id>/cancel")
def cancel(response_id: str) -> Response:
    s = service()
    stored, _ = _find(s, response_id)
    if not stored.background:
        raise invalid(
            "Only a response in background can be cancelled: leave this one instead.", "response_id"
        )
    record = s.rooms.cancel(stored.request_id).record
    if record is None:
        raise _unknown(response_id)
    return jsonify(_object(s, stored, record))


@resource.delete("/v1/responses/<response_id>")
def delete(response_id: str) -> Response:
    """One that still runs is cancelled."""
    s = service()
    stored, _ = _find(s, response_id)
    s.responses.remove(response_id)
    s.rooms.cancel(stored.request_id)
    return jsonify({"id": response_id, "object": "response", "deleted": True})


@resource.get("/v1/responses/<response_id>/input_items")
def input_items(response_id: str) -> Response:
    s = service()
    stored, _ = _find(s, response_id)
    _refuse_arguments(stored)
    limit, after = whole_argument("limit", 1, MAX_PAGE) or 20, request.args.get("after")
    items = stored.items if choice_argument("order", "desc", "asc") == "asc" else stored.items[::-1]
    shown = page(items, after, limit, lambda item: item)
    if shown is None:
        raise invalid(f"There is no item {after!r} in this response.", "after")
    return jsonify(shown)


def _conversation_before(s: Service, response_id: str | None) -> list[Item]:
    """What was said up to the end of a stored response. Raises ApiError."""
    if response_id is None:
        return []
    stored, record = _find(s, response_id)
    if not record.state.terminal:
        raise ApiError(
            409, "The previous response has not ended yet: wait for it.", code="previous_response_open"
        )
    return [*stored.items, *_object(s, stored, record)["output"]]


def _stored(
    s: Service, accepted: Accepted, body: ResponseBody, chat: ChatBody, items: Sequence[Item]
) -> StoredResponse:
    """Its id follows from the request's: a repeat with the same Idempotency-Key finds what is stored."""
    response_id = accepted.request_id.replace("req-", "resp_", 1)
    if accepted.replayed and (earlier := s.responses.find(response_id)):
        return earlier
    return StoredResponse(
        response_id=response_id,
        request_id=accepted.request_id,
        owner=caller().name,
        created=int(time.time()),
        background=body.background,
        items=list(items),
        echo=body.echo | {"temperature": chat.temperature, "top_p": chat.top_p},
        top_logprobs=chat.top_logprobs_wanted,
    )


def _find(s: Service, response_id: str) -> tuple[StoredResponse, Record]:
    """A response of the caller and its request. Raises ApiError (404)."""
    stored = s.responses.find(response_id) if _RESPONSE_ID.fullmatch(response_id) else None
    if stored is None or not caller().may_see(stored.owner):
        raise _unknown(response_id)
    record = s.rooms.record(stored.request_id)
    if record is None:
        raise _unknown(response_id)
    return stored, record


def _refuse_arguments(stored: StoredResponse) -> None:
    """Raises ApiError for what OpenAI would show and this response has not."""
    if switch_argument("include_obfuscation"):
        raise unsupported("include_obfuscation")
    for name in [*request.args.getlist("include"), *request.args.getlist("include[]")]:
        check_included(name)
        if name == LOGPROBS and stored.top_logprobs is None:
            raise invalid(f"{LOGPROBS} must be asked for when the response is created.", "include")


def _unknown(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"There is no response {response_id!r}: it never was, was not stored, or has expired.",
        code="response_not_found",
    )


def _view(s: Service, stored: StoredResponse) -> ResponseView:
    chat = as_chat_of_tools(stored.echo)
    return ResponseView(
        stored, s.model, s.tokenizer, lambda: tool_reply(chat, s.tokenizer, stored.request_id)
    )


def _object(s: Service, stored: StoredResponse, record: Record) -> Object:
    view = _view(s, stored)
    if not record.state.terminal:
        return view.waiting(record)
    tokens, end = s.tokens.read_all(stored.request_id)
    if end is None:
        raise ApiError(500, "The end of this response is lost.", code="stream_lost")
    return view.ended(tokens, end, record)


def _whole(view: ResponseView, attendance: Attendance) -> Object:
    tokens: list[Token] = []
    for item in attendance.events():
        if isinstance(item, list):
            tokens += item
        elif isinstance(item, End):
            refuse_failure(item)
            return view.ended(tokens, item, attendance.record())
    raise AssertionError("it ends by End or an exception")


def _told_again(s: Service, stored: StoredResponse) -> Response:
    """The stream from its first token, without the events that the client has."""
    s.check_free_thread()
    seen, view = _last_seen(), _view(s, stored)
    watch = s.follower.follow(stored.request_id, 0)
    items = events(s, watch, request.environ)
    frames = _frames(view, items, lambda: s.rooms.record(stored.request_id), seen)
    return event_stream(frames, watch.close)


def _frames(
    view: ResponseView,
    items: Iterator[list[Token] | End | None],
    record: Callable[[], Record | None],
    seen: int,
) -> Iterator[str]:
    """`seen` is the number of the last event that the client has, -1 for none."""

    def shown(found: list[Event]) -> str:
        return "".join(
            frame(each.data, event=each.name, event_id=each.number) for each in found if each.number > seen
        )

    try:
        yield shown(view.begin())
        for item in items:
            if item is None:
                yield PING
            elif isinstance(item, End):
                yield shown(view.end(item, record()))
                if seen >= view.next_number:
                    raise position_ahead(view.next_number, seen + 1, "events")
            else:
                yield "".join([shown(view.token(token)) for token in item])
    except ClientGone:
        return
    except ApiError as error:
        told: dict[str, Any] = error.body()["error"]
        yield frame({"type": "error", "sequence_number": view.next_number, **told}, event="error")


def _last_seen() -> int:
    """The last event that the client has: of the header that browsers send, or of `starting_after`."""
    seen = last_event()
    if seen is None:
        seen = whole_argument("starting_after", 0, _MOST_EVENTS)
    return -1 if seen is None else seen
