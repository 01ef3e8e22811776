"""A record as clients see it."""

from typing import Any

from relay.request import Record, Timings, Token
from relay.tokens import End

LEAST_LOGPROB = -9999.0  # JSON has no infinity


def links(request_id: str) -> dict[str, str]:
    here = f"/v1/requests/{request_id}"
    return {"self": here, "stream": f"{here}/stream", "timeline": f"{here}/timeline", "cancel": here}


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> dict[str, Any]:
    """`cached_tokens` None: not known (yet)."""
    details = None if cached_tokens is None else {"cached_tokens": cached_tokens}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": details,
    }


def record_view(record: Record, model: str) -> dict[str, Any]:
    """All of a record but its tokens."""
    error = {"code": record.error_code, "message": record.error_message} if record.error_code else None
    return {
        "id": record.request_id,
        "object": "request",
        "kind": record.kind,
        "model": model,
        "status": record.state.value,
        "created": round(record.timings.submitted / 1000, 3),
        "finish_reason": record.finish_reason,
        "stop_reason": record.stop_reason,
        "error": error,
        "usage": usage(record.prompt_tokens, record.completion_tokens, record.cached_tokens),
        "ledger": ledger(record),
        "links": links(record.request_id),
    }


def ledger(record: Record) -> dict[str, Any]:
    """Where the time of the last attempt went, in ms; null where that has not happened."""
    t: Timings = record.timings
    transfer = {
        "exposed_ms": round(t.transfer_us / 1000, 3),
        "bytes": t.transfer_bytes,
        "spared_bytes": t.spared_bytes,
        "descriptors": t.transfer_descriptors,
    }
    return {
        "queued": _between(t.submitted, t.claimed),
        "bootstrap": _between(t.claimed, t.published),
        "prefill": _between(t.prefill_start, t.prefill_end),
        "transfer": transfer if t.ready else None,
        "admit": _between(t.ready, t.first_token),
        "first_token": _between(t.submitted, t.first_token),
        "decode": _between(t.first_token, t.ended),
        "total": _between(t.submitted, t.ended),
        "attempts": record.attempts,
        "retractions": record.retractions,
    }


def token_view(token: Token) -> dict[str, Any]:
    view = {"position": token.position, "token": token.token_id, "text": token.text}
    return view | {"logprobs": finite(token.logprobs)} if token.logprobs is not None else view


def end_view(end: End, record: Record | None) -> dict[str, Any]:
    """The outcome; `text` is what was held back until the end. `record` None: it cannot be read now."""
    error = {"code": end.error_code, "message": end.error_message} if end.error_code else None
    counts = usage(record.prompt_tokens, record.completion_tokens, record.cached_tokens) if record else None
    return {
        "status": end.state.value,
        "text": end.text,
        "finish_reason": end.finish_reason,
        "stop_reason": end.stop_reason,
        "error": error,
        "usage": counts,
    }


def finite(logprobs: list[list[float]]) -> list[list[float]]:
    """`[[token id, logprob], ...]` with logprobs that JSON can say."""
    return [[int(token_id), max(logprob, LEAST_LOGPROB)] for token_id, logprob in logprobs]


def _between(start_ms: float, end_ms: float) -> float | None:
    # What the first attempt stamped may be later than what the last one did.
    return round(end_ms - start_ms, 3) if 0 < start_ms <= end_ms else None
