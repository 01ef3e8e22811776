"""How a connection is served: it ends without making others wait, and all errors have the one form."""

import json
import logging
import socket
from contextlib import ExitStack, suppress
from http import HTTPStatus
from typing import Any

from gunicorn import util
from gunicorn.http import errors
from gunicorn.workers.gthread import ThreadWorker

from app.gateway.errors import no_http
from app.gateway.patience import HEAD_S, PATIENCE
from relay.log import event

log = logging.getLogger(__name__)

_STATUS = {
    errors.LimitRequestLine: HTTPStatus.REQUEST_URI_TOO_LONG,
    errors.LimitRequestHeaders: HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    errors.ExpectationFailed: HTTPStatus.EXPECTATION_FAILED,
    errors.UnsupportedTransferCoding: HTTPStatus.NOT_IMPLEMENTED,
}
_OURS = (errors.ConfigurationProblem, errors.InvalidResponseHeader, errors.InvalidResponseHeaderName)


class GatewayWorker(ThreadWorker):  # type: ignore[misc]
    """gunicorn waits up to 2 s for the other end of each connection that it closes, in the one thread that
    accepts all others. This worker waits in the thread that served the connection."""

    def handle(self, conn: Any) -> Any:
        """Serve one request. False: the connection is to be closed."""
        with ExitStack() as head:
            head.enter_context(PATIENCE.of(conn.sock, HEAD_S))
            conn.head_is_there = head.close
            kept = super().handle(conn)
        if not kept:
            with suppress(OSError):
                util.close_graceful(conn.sock.dup())
                conn.sock.shutdown(socket.SHUT_RD)  # so that the wait that follows finds its end at once
        return kept

    def handle_request(self, req: Any, conn: Any) -> Any:
        conn.head_is_there()
        return super().handle_request(req, conn)

    def handle_error(self, req: Any, client: socket.socket, addr: Any, exc: Exception) -> None:
        """What is no valid HTTP never comes to the app."""
        if not isinstance(exc, errors.ParseException) or isinstance(exc, _OURS):
            super().handle_error(req, client, addr, exc)
            return
        status = _STATUS.get(type(exc), HTTPStatus.BAD_REQUEST)
        event(log, "invalid_http", status=status.value, error=type(exc).__name__)
        with suppress(OSError):
            util.write_nonblock(client, _answer(status, exc))


def _answer(status: HTTPStatus, error: Exception) -> bytes:
    body = json.dumps(no_http(status, error).body()).encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
