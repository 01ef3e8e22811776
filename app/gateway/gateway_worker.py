"""How a connection of the gateway ends: without making other clients wait."""

import socket
from contextlib import suppress
from typing import Any

from gunicorn import util
from gunicorn.workers.gthread import ThreadWorker


class GatewayWorker(ThreadWorker):  # type: ignore[misc]
    """gunicorn waits up to 2 s for the other end of each connection that it closes, in the one thread that
    accepts all others. This worker waits in the thread that served the connection."""

    def handle(self, conn: Any) -> Any:
        """Serve one request. False: the connection is to be closed."""
        kept = super().handle(conn)
        if not kept:
            with suppress(OSError):
                util.close_graceful(conn.sock.dup())
                conn.sock.shutdown(socket.SHUT_RD)  # so that the wait that follows finds its end at once
        return kept
