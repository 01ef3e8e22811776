"""What clients say in the query string."""

import re

from flask import request

from app.gateway.errors import invalid

_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def whole_argument(name: str, low: int, high: int) -> int | None:
    """None: not given. Raises ApiError for what is no whole number from `low` to `high`."""
    text = request.args.get(name)
    return None if text is None else whole(name, text, low, high)


def whole(name: str, text: str, low: int, high: int) -> int:
    """The number that `text` is. Raises ApiError that names the argument or header."""
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and low <= int(text) <= high):
        raise invalid(f"{name} must be a whole number from {low} to {high}, not {text!r}.", name)
    return int(text)


def seconds_header(name: str) -> float | None:
    """A time above 0. None: not given. Raises ApiError."""
    text = request.headers.get(name)
    if text is None:
        return None
    if not _SECONDS.fullmatch(text) or not float(text):
        raise invalid(f"{name} must be a number of seconds above 0, not {text!r}.", name)
    return float(text)


def last_event() -> int | None:
    """The number of the last event that the client of a stream has. Raises ApiError."""
    header = request.headers.get("Last-Event-ID")
    return whole("Last-Event-ID", header, 0, 1 << 31) if header else None


def last_events(count: int) -> list[int] | None:
    """The same of an answer in `count` parts, with a dot between the numbers of each. Raises ApiError."""
    header = request.headers.get("Last-Event-ID")
    if not header:
        return None
    numbers = [whole("Last-Event-ID", part, 0, 1 << 31) for part in header.split(".")]
    if len(numbers) != count:
        raise invalid(f"Last-Event-ID must hold {count} numbers, not {header!r}.", "Last-Event-ID")
    return numbers


def choice_argument(name: str, *allowed: str) -> str:
    """One of `allowed`; the first where none is given. Raises ApiError."""
    text = request.args.get(name, allowed[0]).lower()
    if text not in allowed:
        raise invalid(f"{name} must be {_listed(allowed)}, not {text!r}.", name)
    return text


def _listed(allowed: tuple[str, ...]) -> str:
    *most, last = allowed
    return f"{', '.join(most)} or {last}"


def switch_argument(name: str) -> bool:
    return choice_argument(name, "0", "1", "false", "true") in ("1", "true")
