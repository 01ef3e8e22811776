"""The API, called from within its own process: a line of a batch is answered as any client is."""

import json
from typing import Any, NamedTuple

from flask import Flask
from werkzeug.test import EnvironBuilder, run_wsgi_app

from app.gateway.line import KEY, Line


class Reply(NamedTuple):
    """`body` is the JSON object that was answered."""

    status: int
    request_id: str
    retry_after_s: float | None
    body: dict[str, Any]

    @property
    def error_code(self) -> str | None:
        error = self.body.get("error")
        return error.get("code") if isinstance(error, dict) else None


class Loopback:
    """Any thread may call; it waits until the request has ended."""

    def __init__(self, app: Flask) -> None:
        self._app = app

    def post(self, path: str, body: dict[str, Any], idempotency_key: str, line: Line) -> Reply:
        """Never raises for what the API refuses: that is an answer."""
        headers = [("Idempotency-Key", idempotency_key)]
        builder = EnvironBuilder(path, method="POST", json=body, headers=headers)
        environ = builder.get_environ()
        builder.close()
        environ[KEY] = line
        pieces, status, replied = run_wsgi_app(self._app, environ)
        retry_after = replied.get("Retry-After")
        return Reply(
            status=int(status.split()[0]),
            request_id=replied["X-Request-Id"],
            retry_after_s=float(retry_after) if retry_after else None,
            body=json.loads(b"".join(pieces)),
        )
