"""A validated body becomes a record, and a doorbell."""

import logging
import secrets
import uuid
from typing import NamedTuple

from flask import current_app, g, request

from app.access import caller
from app.admission import missing, most_output_tokens
from app.arguments import last_event
from app.body import Body, read_body
from app.errors import RETRY_AFTER_S, ApiError, invalid, unavailable
from app.line import Line, current_line
from app.receive import receiving
from app.schema import SamplingFields
from app.service import Service
from relay.answers import SubmitOutcome
from relay.log import event
from relay.request import BATCH_PRIORITY, Ring, Submission
from relay.worker_card import WorkerCard

log = logging.getLogger(__name__)

MAX_KEY_LENGTH = 255


class Accepted(NamedTuple):
    """`replayed`: this idempotency key and body had been accepted before, and nothing new was created.

    `goes_on`: also when its client leaves, since that may come again with the same key.
    """

    request_id: str
    prompt_tokens: int
    replayed: bool
    goes_on: bool


def current_body() -> Body:
    """The body of the current request. Raises ApiError."""
    with receiving(current_app.config["MAX_CONTENT_LENGTH"]):
        raw = request.get_data(cache=False)
    return read_body(raw, request.content_type)


def submit(
    service: Service,
    kind: str,
    body: SamplingFields,
    prompt_ids: tuple[int, ...],
    digest: str,
) -> Accepted:
    """Record the request, then ring. Raises ApiError when it cannot be accepted; nothing is recorded then."""
    if body.model not in (None, service.model):
        raise no_such_model(body.model or "")
    who = caller()
    sent_key = idempotency_key()
    key = f"{who.name}/{sent_key}" if sent_key else None
    body_hash = f"{kind}:{digest}"
    if key and (accepted := _accepted_before(service, key, body_hash, len(prompt_ids))):
        service.meters.submitted.labels(kind, "replayed").inc()
        return accepted
    if last_event() is not None:
        raise _nothing_to_resume()
    max_tokens = _max_tokens(service, body.output_tokens, prompt_ids)
    line = current_line()
    submission = Submission(
        request_id=f"req-{uuid.uuid4().hex}",
        prompt_ids=prompt_ids,
        params=body.params(max_tokens, secrets.randbits(63), service.tokenizer, service.grammars),
        timeout_ms=_timeout_ms(service, body.timeout, line),
        priority=BATCH_PRIORITY if line else body.priority,
        idempotency_key=key,
        body_hash=body_hash,
        kind=kind,
        max_open_requests=service.settings.max_open_requests,
        max_open_bytes=service.settings.max_open_bytes,
        owner=who.name,
        requests_per_minute=who.requests_per_minute,
        tokens_per_minute=who.tokens_per_minute,
    )
    submitted = service.rooms.submit(submission)
    if submitted.outcome is SubmitOutcome.CONFLICT:
        raise _key_conflict()
    if submitted.outcome is SubmitOutcome.FULL:
        raise ApiError(
            429,
            "Too many requests are open. Try again later.",
            code="too_many_requests",
            retry_after_s=RETRY_AFTER_S,
        )
    if submitted.outcome is SubmitOutcome.LIMITED:
        raise _limited(submitted.early_ms)
    for bell in submitted.rings:
        _ring(service, bell)
    replayed = submitted.outcome is SubmitOutcome.DUPLICATE
    service.meters.submitted.labels(kind, "replayed" if replayed else "accepted").inc()
    if not replayed:
        service.meters.prompt_tokens.inc(len(prompt_ids))
    event(
        log,
        "submitted",
        request=submitted.request_id,
        kind=kind,
        prompt_tokens=len(prompt_ids),
        replayed=replayed,
        trace=g.trace,
    )
    return Accepted(submitted.request_id, len(prompt_ids), replayed, goes_on=bool(key) and line is None)


def _ring(service: Service, bell: Ring) -> None:
    """The record holds already: a bell that cannot be rung now is rung again by the reaper."""
    try:
        service.ring(bell)
    except Exception as error:
        event(log, "ring_failed", logging.WARNING, request=bell.request_id, leg=bell.leg, error=error)


def _accepted_before(service: Service, key: str, body_hash: str, prompt_tokens: int) -> Accepted | None:
    """A replay is answered like the first time, even when nothing new could be accepted now."""
    earlier = service.rooms.earlier(key)
    if earlier is None:
        return None
    request_id, earlier_hash = earlier
    if earlier_hash != body_hash:
        raise _key_conflict()
    return Accepted(request_id, prompt_tokens, replayed=True, goes_on=current_line() is None)


def _limited(early_ms: int) -> ApiError:
    message = (
        f"This API key has had its requests or tokens of a minute. Try again in {early_ms / 1000:.1f} s."
    )
    return ApiError(
        429, message, code="rate_limit_exceeded", retry_after_s=max(RETRY_AFTER_S, -(-early_ms // 1000))
    )


def _nothing_to_resume() -> ApiError:
    message = "No stream to go on with: send the Idempotency-Key of its request, or no Last-Event-ID."
    return ApiError(404, message, code="request_not_found", param="Last-Event-ID")


def _key_conflict() -> ApiError:
    message = "This Idempotency-Key came before with another body: use a new key."
    return ApiError(409, message, code="idempotency_conflict")


def no_such_model(name: str) -> ApiError:
    return ApiError(404, f"The model {name!r} does not exist.", code="model_not_found", param="model")


def _max_tokens(service: Service, wanted: int | None, prompt_ids: tuple[int, ...]) -> int:
    """The limit on output: as wanted, else what context and workers leave. Raises ApiError."""
    prompt_tokens = len(prompt_ids)
    left = service.context_tokens - prompt_tokens
    if left < (wanted or 1):
        raise invalid(
            f"This model's maximum context length is {service.context_tokens} tokens. You requested"
            f" {prompt_tokens + (wanted or 1)}: {prompt_tokens} of prompt and {wanted or 1} of output.",
            "prompt" if left < 1 else "max_tokens",
            code="context_length_exceeded",
        )
    fits = most_output_tokens(prompt_tokens, _living_workers(service))
    if fits < (wanted or 1):
        raise invalid(
            f"No living worker can hold {prompt_tokens} prompt tokens and {wanted or 1} output tokens"
            f" in its KV pool; at most {max(fits, 0)} output tokens fit after this prompt.",
            "max_tokens" if fits > 0 else "prompt",
            code="exceeds_kv_capacity",
        )
    return min(left, fits) if wanted is None else wanted


def _living_workers(service: Service) -> list[WorkerCard]:
    workers = service.rooms.workers()
    if without := missing(workers):
        raise unavailable(f"No {' and no '.join(without)} worker is alive. Try again later.", "no_workers")
    return workers


def _timeout_ms(service: Service, timeout_s: float | None, line: Line | None) -> int:
    """A line of a batch may wait as long as its batch."""
    longest = line.timeout_s if line else service.settings.request_timeout_s
    if timeout_s is not None and timeout_s > longest:
        raise invalid(f"timeout must be at most {longest:g} seconds.", "timeout")
    return max(1, round(1000 * (timeout_s or longest)))


def idempotency_key() -> str | None:
    """What the client sent to name this request. Raises ApiError."""
    key = request.headers.get("Idempotency-Key")
    if key is None:
        return None
    if not 0 < len(key) <= MAX_KEY_LENGTH or not key.isascii() or not key.isprintable():
        raise invalid(
            f"Idempotency-Key must be 1 to {MAX_KEY_LENGTH} printable ASCII characters.", "Idempotency-Key"
        )
    return key
