"""The other end of the connection."""

import select
import socket
from typing import Any

from app.gateway.line import KEY, Line


class ClientGone(Exception):
    """The client closed the connection before its reply was complete."""


def client_gone(environ: dict[str, Any]) -> bool:
    """True when the client of this WSGI request has closed its connection. Never waits.

    WSGI notices only when it writes, which is never while a reply that is not streamed is being made.
    """
    line: Line | None = environ.get(KEY)
    if line is not None:
        return line.abandoned()
    connection = environ.get("gunicorn.socket") or environ.get("werkzeug.socket")
    if type(connection) is not socket.socket:
        return False  # TLS ends here: what is readable says nothing about the stream inside
    waiter = select.poll()  # not select.select: that cannot look at the sockets beyond the first thousand
    try:
        waiter.register(connection, select.POLLIN)
        return bool(waiter.poll(0)) and not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except (OSError, ValueError):
        return True
