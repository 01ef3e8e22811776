"""Take in what a client sends: no more than is allowed, and not for ever."""

from collections.abc import Iterator
from contextlib import contextmanager

from flask import request
from werkzeug.exceptions import ClientDisconnected, RequestEntityTooLarge

from app.gateway.errors import ApiError

_MOST_DISCARDED_BYTES = 64 << 20
_DISCARD_BYTES = 1 << 16


@contextmanager
def receiving(most_bytes: int) -> Iterator[None]:
    """Read the body of the current request within. Raises ApiError (408, 413) when it does not come whole."""
    request.max_content_length = most_bytes
    try:
        yield
    except RequestEntityTooLarge:
        _discard_body()
        raise too_large(most_bytes) from None
    except ClientDisconnected:
        message = "The body stopped before its end: send it without long pauses."
        raise ApiError(408, message, code="request_timeout") from None


def too_large(most_bytes: int) -> ApiError:
    message = f"The body may hold at most {most_bytes} bytes."
    return ApiError(413, message, code="request_entity_too_large")


def _discard_body() -> None:
    """Most clients look for the answer once they have sent all: closed before, they would not see it."""
    body, left = request.environ["wsgi.input"], _MOST_DISCARDED_BYTES
    while left > 0 and (chunk := body.read(_DISCARD_BYTES)):
        left -= len(chunk)
