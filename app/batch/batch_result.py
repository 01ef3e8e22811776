"""What a line of a batch leaves: one line of the output or of the error file."""

import json
from typing import Any, NamedTuple

from app.gateway.loopback import Reply
from relay.batches import NO_TOKENS, Kind, Tokens


class Result(NamedTuple):
    """`text` is JSON without the newline."""

    kind: Kind
    text: bytes
    tokens: Tokens = NO_TOKENS


def result_id(batch_id: str, number: int) -> str:
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}"


def answered(result_id: str, custom_id: str, reply: Reply) -> Result:
    """The API's answer, whatever it is: what it refused goes to the error file."""
    response = {"status_code": reply.status, "request_id": reply.request_id, "body": reply.body}
    kind = Kind.OUTPUT if 200 <= reply.status < 300 else Kind.ERRORS
    return Result(kind, _line(result_id, custom_id, response, None), used(reply.body))


def unanswered(result_id: str, custom_id: str, code: str, message: str) -> Result:
    """The line never came to its end."""
    return Result(Kind.ERRORS, _line(result_id, custom_id, None, {"code": code, "message": message}))


def used(body: dict[str, Any]) -> Tokens:
    """The tokens that an answer counts, in the form of completions or of responses."""
    usage = body.get("usage") or {}
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return Tokens(
        input=usage.get("prompt_tokens", usage.get("input_tokens", 0)),
        cached=details.get("cached_tokens", 0),
        output=usage.get("completion_tokens", usage.get("output_tokens", 0)),
    )


def _line(
    result_id: str, custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None
) -> bytes:
    fields = {"id": result_id, "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(fields, separators=(",", ":")).encode()
