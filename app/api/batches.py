"""/v1/batches: many requests from one file, answered into another."""

import re
import secrets
from typing import Any

from flask import Blueprint, Response, jsonify, request
from pydantic import Field

from app.api.files import find as find_file
from app.fields.schema import validate
from app.gateway.access import caller
from app.gateway.arguments import whole_argument
from app.gateway.errors import ApiError, invalid
from app.gateway.metadata import Metadata
from app.gateway.page import first_of
from app.gateway.service import service
from app.gateway.strict import Strict
from app.generation.submit import current_body, idempotency_key
from relay.batches import Batch, BatchStatus, KeyConflict, Order

resource = Blueprint("batches", __name__)

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
INPUT_PURPOSE = "batch"
MAX_PAGE = 100
_MAX_WINDOW_S = 14 * 86_400
_UNIT_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")
_STAMPED = (
    BatchStatus.IN_PROGRESS,
    BatchStatus.FINALIZING,
    BatchStatus.COMPLETED,
    BatchStatus.FAILED,
    BatchStatus.EXPIRED,
    BatchStatus.CANCELLING,
    BatchStatus.CANCELLED,
)


class _Expiry(Strict):
    anchor: str = Field(pattern="^created_at$")
    seconds: int = Field(ge=3_600, le=2_592_000)


class BatchBody(Strict):
    """`POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Metadata | None = None
    output_expires_after: _Expiry | None = None


@resource.post("/v1/batches")
def create() -> Response:
    raw = current_body()
    body = validate(BatchBody, raw.fields)
    s = service()
    if body.endpoint not in ENDPOINTS:
        raise invalid(f"endpoint must be one of {', '.join(ENDPOINTS)}, not {body.endpoint!r}.", "endpoint")
    file = find_file(s, body.input_file_id)
    if file.purpose != INPUT_PURPOSE:
        raise invalid(f"The file has the purpose {file.purpose}: upload it with batch.", "input_file_id")
    order = Order(
        batch_id=f"batch_{secrets.token_hex(16)}",
        owner=caller().name,
        endpoint=body.endpoint,
        input_file_id=file.file_id,
        completion_window=body.completion_window,
        window_s=_window_s(body.completion_window),
        metadata=body.metadata,
        output_expires_s=body.output_expires_after.seconds if body.output_expires_after else None,
        idempotency_key=idempotency_key(),
        body_hash=raw.digest,
    )
    try:
        batch, new = s.batches.create(order)
    except KeyConflict:
        raise ApiError(
            409,
            "This Idempotency-Key came before with another body: use a new key.",
            code="idempotency_conflict",
        ) from None
    response = jsonify(view(batch, s.model))
    if not new:
        response.headers["Idempotency-Replayed"] = "true"
    return response


@resource.get("/v1/batches")
def list_all() -> Response:
    s = service()
    limit, after = whole_argument("limit", 1, MAX_PAGE) or 20, request.args.get("after")
    found = s.batches.of(caller().name, after, limit + 1)
    if found is None:
        raise _unknown(after or "")
    return jsonify(first_of([view(batch, s.model) for batch in found], limit))


@resource.get("/v1/batches/<batch_id>")
def show(batch_id: str) -> Response:
    return jsonify(view(_find(batch_id), service().model))


@resource.post("/v1/batches/<batch_id>/cancel")
def cancel(batch_id: str) -> Response:
    s = service()
    _find(batch_id)
    batch = s.batches.cancel(batch_id)
    if batch is None:
        raise _unknown(batch_id)
    if batch.status not in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
        raise ApiError(409, f"This batch is {batch.status} already.", code="batch_not_cancellable")
    return jsonify(view(batch, s.model))


def _find(batch_id: str) -> Batch:
    batch = service().batches.find(batch_id) if _BATCH_ID.fullmatch(batch_id) else None
    if batch is None or not caller().may_see(batch.owner):
        raise _unknown(batch_id)
    return batch


def _unknown(batch_id: str) -> ApiError:
    return ApiError(404, f"There is no batch {batch_id!r}.", code="batch_not_found")


def _window_s(text: str) -> int:
    found = re.fullmatch(r"([1-9][0-9]{0,6})([smhd])", text)
    window_s = int(found[1]) * _UNIT_S[found[2]] if found else 0
    if not 0 < window_s <= _MAX_WINDOW_S:
        raise invalid(
            f"completion_window must be a time of at most 14 days, as 24h or 90m, not {text!r}.",
            "completion_window",
        )
    return window_s


def view(batch: Batch, model: str) -> dict[str, Any]:
    """A batch in OpenAI's form; times are null where they have not come."""
    errors = [each._asdict() for each in batch.errors]
    tokens = batch.tokens
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": model,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status.value,
        "output_file_id": batch.output_file_id if batch.status.terminal else None,
        "error_file_id": batch.error_file_id if batch.status.terminal else None,
        "created_at": batch.created,
        "expires_at": batch.expires,
        **{f"{status}_at": batch.times.get(status) for status in _STAMPED},
        "request_counts": {
            "total": batch.total or 0,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "usage": {
            "input_tokens": tokens.input,
            "input_tokens_details": {"cached_tokens": tokens.cached},
            "output_tokens": tokens.output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": tokens.input + tokens.output,
        },
        "metadata": batch.metadata,
    }
