"""/v1/requests: submit, poll, stream, cancel, list."""

import re
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from flask import Blueprint, Response, jsonify, request
from redis.exceptions import RedisError

from app.fields.prompt import prompt_of_conversation, prompt_of_text
from app.fields.schema import NativeBody, parse
from app.gateway.access import caller
from app.gateway.arguments import last_event, switch_argument, whole_argument
from app.gateway.client import ClientGone
from app.gateway.conditional import unless_known
from app.gateway.errors import ApiError, invalid, position_ahead, unknown_request
from app.gateway.events import events
from app.gateway.follow import ClientLeft, StreamDiverged, Watch
from app.gateway.recent import is_watching
from app.gateway.service import Service, service
from app.gateway.sse import PING, event_stream, frame
from app.generation.submit import current_body, ring_all, submit_all
from app.generation.timeline_view import timeline_view
from app.generation.view import end_view, finite, links, record_view, token_view
from relay.request import Record, Token
from relay.tokens import End

resource = Blueprint("requests", __name__)

KIND = "request"
MAX_WAIT_S = 60.0
MAX_PAGE = 1_000
_RETRY_MS = 1_000
_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@resource.post("/v1/requests")
def create() -> tuple[Response, int]:
    raw = current_body()
    body = parse(NativeBody, raw.fields)
    s = service()
    if body.prompt is not None:
        prompt_ids = prompt_of_text(s, body, body.prompt)
    else:
        prompt_ids = prompt_of_conversation(s, body)
    accepted = submit_all(s, KIND, body, [prompt_ids], raw.digest, body.n)
    first, *others = ({"id": each, "links": links(each)} for each in accepted.request_ids)
    reply = {"id": first["id"], "status": "queued", "links": first["links"]}
    response = jsonify(reply | {"samples": [first, *others]} if others else reply)
    response.headers["Location"] = links(accepted.request_id)["self"]
    if accepted.replayed:
        response.headers["Idempotency-Replayed"] = "true"
    return response, 202


@resource.get("/v1/requests")
def list_all() -> Response:
    s = service()
    limit = whole_argument("limit", 1, MAX_PAGE) or 20
    before = request.args.get("before")
    if before is not None:
        _find(s, before)
    who = caller()
    owner = None if who.admin else who.name
    ask = partial(_list, s, limit, before, owner)
    key = ("requests", limit, before, owner)
    return unless_known(s.recent.get(key, ask) if is_watching() else ask())


def _list(s: Service, limit: int, before: str | None, owner: str | None) -> dict[str, Any]:
    records = s.rooms.list_requests(limit, before, owner)
    after = records[-1].request_id if len(records) == limit else None
    return {"object": "list", "data": [record_view(r, s.model) for r in records], "before": after}


@resource.get("/v1/requests/<request_id>")
def show(request_id: str) -> Response:
    s = service()
    after = whole_argument("after", 0, 1 << 31)
    wait_s = _wait_argument()
    with_ids = switch_argument("token_ids")
    record = _find(s, request_id)
    if wait_s and not record.state.terminal and (after is None or after >= record.completion_tokens):
        s.check_free_thread()
        _wait(s, record, after, wait_s)
        record = _find(s, request_id)
    tokens, end = s.tokens.read_all(request_id, after or 0)
    if end and not record.state.terminal:
        record = _find(s, request_id)  # it ended between the two reads
    return jsonify(record_view(record, s.model) | _words(s, record, tokens, end, after or 0, with_ids))


@resource.delete("/v1/requests/<request_id>")
def cancel(request_id: str) -> Response:
    s = service()
    _find(s, request_id)
    record, rings = s.rooms.cancel(request_id)
    ring_all(s, rings)
    if record is None:
        raise unknown_request(request_id)
    return jsonify(record_view(record, s.model))


@resource.get("/v1/requests/<request_id>/stream")
def stream(request_id: str) -> Response:
    s = service()
    s.check_free_thread()
    start = _resume_position()
    record = _find(s, request_id)
    if start > record.completion_tokens:
        raise position_ahead(record.completion_tokens, start, "tokens")
    watch = s.follower.follow(request_id, start)
    return event_stream(_frames(s, watch, request.environ), watch.close)


@resource.get("/v1/requests/<request_id>/timeline")
def timeline(request_id: str) -> Response:
    s = service()
    _find(s, request_id)
    found = s.rooms.timeline(request_id)
    if found is None:
        raise unknown_request(request_id)
    return jsonify(timeline_view(found))


def _frames(s: Service, watch: Watch, environ: dict[str, Any]) -> Iterator[str]:
    # The first bytes at once: a client that waits for headers sees that it is connected.
    yield f"retry: {_RETRY_MS}\n\n"
    try:
        for item in events(s, watch, environ):
            if item is None:
                yield PING
            elif isinstance(item, End):
                yield frame(end_view(item, _record_if_readable(s, watch.request_id)), event="end")
            else:
                s.meters.streamed_tokens.inc(len(item))
                yield "".join([frame(token_view(token), event_id=token.position + 1) for token in item])
    except ClientGone:
        s.meters.disconnects.inc()
    except ApiError as error:
        yield frame(error.body(), event="error")


def _wait(s: Service, record: Record, after: int | None, wait_s: float) -> None:
    """Until the end, or a token at position `after` if given; at most `wait_s`."""
    deadline = time.monotonic() + wait_s
    start = record.completion_tokens if after is None else after
    with (
        s.follower.follow(record.request_id, start) as watch,
        s.departures.watching(request.environ, watch.inbox.leave),
    ):
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                item = watch.take(left_s)
            except StreamDiverged:
                return  # what is there now is the truth
            if isinstance(item, End | ClientLeft) or (after is not None and isinstance(item, list)):
                return


def _words(
    s: Service, record: Record, tokens: list[Token], end: End | None, start: int, with_ids: bool
) -> dict[str, Any]:
    """`text` begins with the token at `start`; `position` is where the next poll goes on."""
    words: dict[str, Any] = {
        "text": "".join(token.text for token in tokens) + (end.text if end else ""),
        "position": start + len(tokens),
    }
    if with_ids:
        words["token_ids"] = [token.token_id for token in tokens]
    if record.params.prompt_logprobs is not None and (scores := s.rooms.scores(record.request_id)):
        words["prompt_logprobs"] = [None, *map(finite, scores.pairs())]
    if record.params.logprobs is not None:
        words["logprobs"] = [finite(token.logprobs or []) for token in tokens]
    return words


def _record_if_readable(s: Service, request_id: str) -> Record | None:
    try:
        return s.rooms.record(request_id)
    except RedisError:
        return None


def _find(s: Service, request_id: str) -> Record:
    record = s.rooms.record(_valid_id(request_id))
    if record is None or not caller().may_see(record.owner):
        raise unknown_request(request_id)
    return record


def _valid_id(request_id: str) -> str:
    if not _REQUEST_ID.fullmatch(request_id):
        raise unknown_request(request_id)
    return request_id


def _resume_position() -> int:
    """How many tokens the client has: of the header that browsers send, or of `after`."""
    seen = last_event()
    return (whole_argument("after", 0, 1 << 31) or 0) if seen is None else seen


def _wait_argument() -> float:
    text = request.args.get("wait", "0")
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = -1.0
    if not 0 <= wait_s <= MAX_WAIT_S:
        raise invalid(f"wait must be a number of seconds from 0 to {MAX_WAIT_S:g}, not {text!r}.", "wait")
    return wait_s
