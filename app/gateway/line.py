"""A line of a batch, as the API that answers it sees it."""

from collections.abc import Callable
from typing import NamedTuple

from flask import request

KEY = "kvrelay.line"


class Line(NamedTuple):
    """Lies in the WSGI environment, out of reach of clients. `timeout_s`: until its batch expires.

    `abandoned` tells, at any time, that nobody wants its answer any more.
    """

    owner: str
    timeout_s: float
    abandoned: Callable[[], bool]


def current_line() -> Line | None:
    """The line that the current request is, None for a client's own request."""
    found: Line | None = request.environ.get(KEY)
    return found
