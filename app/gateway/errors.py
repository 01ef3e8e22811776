"""What clients are told when something is wrong: one form for every status."""

import logging
from typing import Any

from flask import Flask, Response, jsonify
from redis.exceptions import RedisError
from werkzeug.exceptions import HTTPException

from relay.log import event
from relay.protocol import ProtocolMismatch
from relay.redis_client import AWAY

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    499: "request_cancelled",
    503: "service_unavailable",
}


class ApiError(Exception):
    """Ends a request with `status` and an error body. `retry_after_s`: the same request may succeed later."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        response = jsonify(self.body())
        response.status_code = self.status
        if self.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        if self.retry_after_s is not None:
            response.headers["Retry-After"] = str(self.retry_after_s)
        return response


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """The client sent something that no server of this model would take."""
    return ApiError(400, message, code=code, param=param)


def unavailable(message: str, code: str) -> ApiError:
    """Nothing was accepted; the same request may be sent again."""
    return ApiError(503, message, code=code, retry_after_s=RETRY_AFTER_S)


def too_deep() -> ApiError:
    return invalid("The body is nested too deeply.", code="invalid_json")


def unknown_request(request_id: str) -> ApiError:
    return ApiError(
        404,
        f"There is no request {request_id!r}: it never was, or its result has expired.",
        code="request_not_found",
    )


def position_ahead(there: int, seen: int, unit: str) -> ApiError:
    return ApiError(
        409,
        f"The stream has {there} {unit}, so nobody can have read {seen}: read it from the start.",
        code="position_ahead",
        param="Last-Event-ID",
    )


def no_http(status: int, error: Exception) -> ApiError:
    return ApiError(
        status, f"This is no HTTP that the gateway takes ({str(error)[:200]}).", code="invalid_http"
    )


def redis_away() -> ApiError:
    return unavailable(
        "Redis cannot be reached or may not write. Try again; with an Idempotency-Key nothing runs twice.",
        "redis_away",
    )


def install(app: Flask) -> None:
    """Answer every error of `app` in the one form."""
    app.register_error_handler(ApiError, ApiError.response)
    app.register_error_handler(RedisError, _on_redis_error)
    app.register_error_handler(ProtocolMismatch, _on_other_version)
    app.register_error_handler(HTTPException, _on_http_exception)
    app.register_error_handler(RecursionError, _on_deep_body)
    app.register_error_handler(Exception, _on_bug)


def _on_redis_error(error: RedisError) -> Response:
    if not isinstance(error, AWAY):
        return _on_bug(error)
    event(log, "redis_away", logging.WARNING, error=error)
    return redis_away().response()


def _on_other_version(error: ProtocolMismatch) -> Response:
    event(log, "other_version", logging.ERROR, error=error)
    message = "Another version of kvrelay has taken over from this gateway."
    return unavailable(message, "other_version").response()


def _on_http_exception(error: HTTPException) -> Response:
    status = error.code or 500
    code = (error.name or "error").lower().replace(" ", "_")
    response = ApiError(status, error.description or error.name, code=code).response()
    for name, value in error.get_headers():
        if name == "Allow":
            response.headers[name] = value
    return response


def _on_deep_body(error: RecursionError) -> Response:
    """What a body holds may be read, and still be too deep for who goes through it later."""
    return too_deep().response()


def _on_bug(error: Exception) -> Response:
    log.exception("unexpected_error")
    return ApiError(500, "The gateway failed here; its log says why.", code="internal_error").response()
