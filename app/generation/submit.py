"""A validated body becomes a record, and a doorbell."""

import logging
import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from flask import current_app, g, request

from app.fields.first_token import refuse_contradiction
from app.fields.schema import SamplingFields
from app.gateway.access import caller
from app.gateway.admission import missing, most_output_tokens
from app.gateway.arguments import seconds_header
from app.gateway.body import Body, read_body
from app.gateway.errors import RETRY_AFTER_S, ApiError, invalid, unavailable
from app.gateway.line import Line, current_line
from app.gateway.receive import receiving
from app.gateway.service import Service
from relay.answers import SubmitOutcome
from relay.functions import UnsupportedServer
from relay.log import event
from relay.request import BATCH_PRIORITY, Ring, Submission, member_id
from relay.worker_card import WorkerCard

log = logging.getLogger(__name__)

MAX_KEY_LENGTH = 255
_SYNC_MS = 1_800  # `everysec` takes one second; the client of Redis waits two
MAX_GROUP = 1_024  # answers that one call asks for: the server accepts them in one step


class Accepted(NamedTuple):
    """`replayed`: this idempotency key and body had been accepted before, and nothing new was created.

    `goes_on`: also when its client leaves, since that may come again with the same key. It is `samples`
    requests for each of `prompts` prompts, whose tokens are counted once; `request_id` is that of the first.
    """

    request_id: str
    prompt_tokens: int
    replayed: bool
    goes_on: bool
    prompts: int = 1
    samples: int = 1

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Of every sample, prompt by prompt."""
        return tuple(member_id(self.request_id, index) for index in range(self.prompts * self.samples))

    @property
    def leaders(self) -> tuple[str, ...]:
        """The first sample of each prompt."""
        return self.request_ids[:: self.samples]


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
    """As `submit_all`, of one request."""
    return submit_all(service, kind, body, [prompt_ids], digest)


def submit_all(
    service: Service,
    kind: str,
    body: SamplingFields,
    prompts: Sequence[tuple[int, ...]],
    digest: str,
    samples: int = 1,
) -> Accepted:
    """Record `samples` requests for each prompt, then ring. Raises ApiError when they cannot be accepted;
    nothing is recorded then, unless all there is to say is that Redis has not written it to its disk yet."""
    if body.model not in (None, service.model):
        raise no_such_model(body.model or "")
    g.trace = body.request_id or g.trace
    who = caller()
    sent_key = idempotency_key()
    key = f"{who.name}/{sent_key}" if sent_key else None
    body_hash = f"{kind}:{digest}"
    line = current_line()
    accepted = Accepted(
        request_id=f"req-{uuid.uuid4().hex}",
        prompt_tokens=sum(map(len, prompts)),
        replayed=False,
        goes_on=bool(key) and line is None,
        prompts=len(prompts),
        samples=samples,
    )
    # A line that was accepted before is found by `submit` itself, and what is full now it may wait for.
    if key and line is None and (earlier := _accepted_before(service, key, body_hash)):
        _keep(service)
        service.meters.submitted.labels(kind, "replayed").inc()
        return accepted._replace(request_id=earlier, replayed=True)
    if request.headers.get("Last-Event-ID"):
        raise _nothing_to_resume()
    _refuse_too_many(service, accepted)
    if 0 < who.tokens_per_minute < accepted.prompt_tokens:
        raise invalid(
            f"This API key may have {who.tokens_per_minute} tokens a minute, and the prompt has"
            f" {accepted.prompt_tokens}: it would never be its turn.",
            "prompt",
            code="exceeds_token_limit",
        )
    limits = _max_tokens(service, body.output_tokens, prompts)
    params = body.params(min(limits), secrets.randbits(63), service.tokenizer, service.grammars)
    refuse_contradiction(params, service.tokenizer.eos_ids, service.grammars)
    first = Submission(
        request_id=accepted.request_id,
        prompt_ids=prompts[0],
        params=params,
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
        spent_ms=1000 * (time.monotonic() - g.began),
        trace=g.context._replace(sampled=service.tracing is not None and service.tracing.samples(g.context)),
    )
    submitted = service.rooms.submit(*_group(first, prompts, limits, samples, body.seed is not None))
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
    if submitted.outcome is SubmitOutcome.LATE:
        raise _too_late(submitted.early_ms)
    ring_all(service, submitted.rings)
    _keep(service)
    replayed = submitted.outcome is SubmitOutcome.DUPLICATE
    service.meters.submitted.labels(kind, "replayed" if replayed else "accepted").inc()
    event(
        log,
        "submitted",
        request=submitted.request_id,
        kind=kind,
        prompt_tokens=accepted.prompt_tokens,
        prompts=accepted.prompts,
        samples=samples,
        replayed=replayed,
        trace=g.trace,
        trace_id=g.context.trace_id,
    )
    return accepted._replace(request_id=submitted.request_id, replayed=replayed)


def _group(
    first: Submission, prompts: Sequence[tuple[int, ...]], limits: Sequence[int], samples: int, seeded: bool
) -> list[Submission]:
    """Every sample of every prompt; the first of a prompt leads the others. A seed is for each prompt the
    same, as if it had come alone."""
    group = []
    for number, (prompt_ids, max_tokens) in enumerate(zip(prompts, limits, strict=True)):
        seed = first.params.seed if seeded else secrets.randbits(63)
        params = replace(first.params, max_tokens=max_tokens, seed=seed)
        leader = member_id(first.request_id, number * samples)
        for index in range(samples):
            group.append(
                replace(
                    first,
                    request_id=member_id(first.request_id, number * samples + index),
                    prompt_ids=prompt_ids,
                    params=params.sample(index),
                    leader=leader if index else None,
                )
            )
    return group


def _refuse_too_many(service: Service, accepted: Accepted) -> None:
    most = min(MAX_GROUP, service.settings.max_open_requests)
    if (wanted := accepted.prompts * accepted.samples) > most:
        raise invalid(
            f"{accepted.prompts} prompts with {accepted.samples} samples each are {wanted} answers; one call"
            f" may ask for {most}.",
            "n" if accepted.samples > 1 else "prompt",
        )


def ring_all(service: Service, bells: Sequence[Ring]) -> None:
    """The records hold already: a bell that cannot be rung now is rung again by the reaper."""
    for bell in bells:
        try:
            service.ring(bell)
        except Exception as error:
            event(log, "ring_failed", logging.WARNING, request=bell.request_id, leg=bell.leg, error=error)


def _accepted_before(service: Service, key: str, body_hash: str) -> str | None:
    """The id under this key: a replay is answered as at first, also if nothing new could be accepted."""
    earlier = service.rooms.earlier(key)
    if earlier is None:
        return None
    request_id, earlier_hash = earlier
    if earlier_hash != body_hash:
        raise _key_conflict()
    if service.rooms.state(request_id) is None:
        raise _result_expired()
    return request_id


def _keep(service: Service) -> None:
    """Nothing is accepted that a crash of Redis could undo, where that is asked for. Raises ApiError."""
    if not service.settings.accept_sync:
        return
    try:
        kept = service.rooms.sync(_SYNC_MS)
    except UnsupportedServer as error:
        raise unavailable(f"{error}.", "not_durable") from error
    if not kept:
        message = (
            "Redis did not write to its disk in time. Try again; with an Idempotency-Key nothing runs twice."
        )
        raise unavailable(message, "not_durable")


def _limited(early_ms: int) -> ApiError:
    message = (
        f"This API key has had its requests or tokens of a minute. Try again in {early_ms / 1000:.1f} s."
    )
    return ApiError(429, message, code="rate_limit_exceeded", retry_after_s=_up_to_s(early_ms))


def _too_late(early_ms: int) -> ApiError:
    message = (
        f"What waits takes about {early_ms / 1000:.1f} s longer than this request may. Try again then, or"
        " with a longer timeout."
    )
    return ApiError(429, message, code="deadline_unreachable", retry_after_s=_up_to_s(early_ms))


def _up_to_s(ms: int) -> int:
    return max(RETRY_AFTER_S, -(-ms // 1000))


def _nothing_to_resume() -> ApiError:
    message = "No stream to go on with: send the Idempotency-Key of its request, or no Last-Event-ID."
    return ApiError(404, message, code="request_not_found", param="Last-Event-ID")


def _key_conflict() -> ApiError:
    message = "This Idempotency-Key came before with another body: use a new key."
    return ApiError(409, message, code="idempotency_conflict")


def _result_expired() -> ApiError:
    message = (
        "The request with this Idempotency-Key has been answered, and its result has expired: use a new key"
        " to run it again."
    )
    return ApiError(410, message, code="result_expired")


def no_such_model(name: str) -> ApiError:
    return ApiError(404, f"The model {name!r} does not exist.", code="model_not_found", param="model")


def _max_tokens(service: Service, wanted: int | None, prompts: Sequence[tuple[int, ...]]) -> list[int]:
    """Limits on output, by prompt: as wanted, else what context and workers leave. Raises ApiError."""
    left = [_left_in_context(service, wanted, len(prompt_ids)) for prompt_ids in prompts]
    workers = _living_workers(service)
    fit = [_fits(wanted, len(prompt_ids), workers) for prompt_ids in prompts]
    return [min(each) if wanted is None else wanted for each in zip(left, fit, strict=True)]


def _left_in_context(service: Service, wanted: int | None, prompt_tokens: int) -> int:
    left = service.context_tokens - prompt_tokens
    if left < (wanted or 1):
        raise invalid(
            f"This model's maximum context length is {service.context_tokens} tokens. You requested"
            f" {prompt_tokens + (wanted or 1)}: {prompt_tokens} of prompt and {wanted or 1} of output.",
            "prompt" if left < 1 else "max_tokens",
            code="context_length_exceeded",
        )
    return left


def _fits(wanted: int | None, prompt_tokens: int, workers: Sequence[WorkerCard]) -> int:
    fits = most_output_tokens(prompt_tokens, workers)
    if fits < (wanted or 1):
        raise invalid(
            f"No living worker can hold {prompt_tokens} prompt tokens and {wanted or 1} output tokens"
            f" in its KV pool; at most {max(fits, 0)} output tokens fit after this prompt.",
            "max_tokens" if fits > 0 else "prompt",
            code="exceeds_kv_capacity",
        )
    return fits


def _living_workers(service: Service) -> list[WorkerCard]:
    workers = service.rooms.workers()
    if without := missing(workers):
        raise unavailable(f"No {' and no '.join(without)} worker is alive. Try again later.", "no_workers")
    return workers


def _timeout_ms(service: Service, timeout_s: float | None, line: Line | None) -> int:
    """A line of a batch may wait as long as its batch. A header is from whoever is between client and
    gateway, so it only shortens."""
    longest = line.timeout_s if line else service.settings.request_timeout_s
    if timeout_s is not None and timeout_s > longest:
        raise invalid(f"timeout must be at most {longest:g} seconds.", "timeout")
    return max(1, round(1000 * min(timeout_s or longest, seconds_header("X-Request-Timeout") or longest)))


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
