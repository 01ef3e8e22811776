"""Take in what a client sends: no more than is allowed, and not for ever."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus

from flask import request
from gunicorn.http.errors import ParseException
from werkzeug.exceptions import ClientDisconnected, RequestEntityTooLarge

from app.gateway.errors import ApiError, no_http
from app.gateway.patience import BODY_BYTES_PER_S, BODY_S, PATIENCE

_FORM = "multipart/form-data"
_MOST_DISCARDED_BYTES = 64 << 20
_DISCARD_BYTES = 1 << 16


@contextmanager
def receiving(most_bytes: int) -> Iterator[None]:
    """Read the body of the current request within. Raises ApiError (400, 408, 413) unless it comes whole."""
    request.max_content_length = most_bytes
    seconds = BODY_S + min(request.content_length or most_bytes, most_bytes) / BODY_BYTES_PER_S
    with PATIENCE.of(request.environ.get("gunicorn.socket"), seconds):
        try:
            yield
        except RequestEntityTooLarge:
            _discard_body()
            raise _too_much(most_bytes) from None
        except ParseException as error:
            raise no_http(HTTPStatus.BAD_REQUEST, error) from None
        except ClientDisconnected:
            message = "The body stopped before its end, or took too long: send it at once."
            raise ApiError(408, message, code="request_timeout") from None


def _too_much(most_bytes: int) -> ApiError:
    if request.mimetype != _FORM or (request.content_length or 0) > most_bytes:
        return too_large(most_bytes)
    message = "The form has too many parts, or one beside the file is too large."
    return ApiError(413, message, code="request_entity_too_large")


def too_large(most_bytes: int) -> ApiError:
    message = f"The body may hold at most {most_bytes} bytes."
    return ApiError(413, message, code="request_entity_too_large")


def _discard_body() -> None:
    """Most clients look for the answer once they have sent all: closed before, they would not see it."""
    body, left = request.environ["wsgi.input"], _MOST_DISCARDED_BYTES
    with suppress(OSError, ParseException):  # it stops before its end
        while left > 0 and (chunk := body.read(_DISCARD_BYTES)):
            left -= len(chunk)
