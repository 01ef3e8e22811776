"""The lines of an input file, read one by one, and what may be wrong with them."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from relay.batches import BatchError

MAX_LINES = 50_000
MAX_ERRORS = 100
_METHOD = "POST"


class InputLine(NamedTuple):
    """`number` counts from 0, blank lines included."""

    number: int
    text: bytes


class Call(NamedTuple):
    """What a line asks for."""

    custom_id: str
    body: dict[str, Any]


class LineRefused(Exception):
    """Something is wrong with a line."""

    def __init__(self, error: BatchError) -> None:
        super().__init__(error.message)
        self.error = error


class Checked(NamedTuple):
    """Errors: the file is refused. `total` counts the lines with a request."""

    total: int
    errors: list[BatchError]


def read_lines(pieces: Iterable[bytes], most_bytes: int) -> Iterator[InputLine]:
    """The lines that are not blank. Raises LineRefused for one of more than `most_bytes`."""
    number, rest = 0, b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for text in whole:
            yield from _line(number, text, most_bytes)
            number += 1
        _check_length(number, rest, most_bytes)
    yield from _line(number, rest, most_bytes)


def parse_line(line: InputLine, endpoint: str) -> Call:
    """Raises LineRefused."""
    try:
        fields = json.loads(line.text)
    except (ValueError, RecursionError):
        raise _refused(line, "invalid_json_line", "This line is not valid JSON.") from None
    if not isinstance(fields, dict):
        raise _refused(line, "invalid_json_line", "This line is no JSON object.")
    custom_id, body = fields.get("custom_id"), fields.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise _refused(line, "missing_required_parameter", "custom_id must be a text.", "custom_id")
    if fields.get("method") != _METHOD:
        raise _refused(line, "invalid_method", f"method must be {_METHOD}.", "method")
    if fields.get("url") != endpoint:
        raise _refused(line, "invalid_url", f"url must be {endpoint}, the endpoint of the batch.", "url")
    if not isinstance(body, dict):
        raise _refused(line, "missing_required_parameter", "body must be an object.", "body")
    if body.get("stream") or body.get("background"):
        raise _refused(line, "invalid_request", "A line can neither stream nor run in background.", "body")
    return Call(custom_id, body)


def check(lines: Iterator[InputLine], endpoint: str) -> Checked:
    """Read all lines, and keep a hash of each custom_id only."""
    seen: set[bytes] = set()
    errors: list[BatchError] = []
    total = 0
    try:
        for line in lines:
            total += 1
            if total > MAX_LINES:
                message = f"The file holds more than {MAX_LINES} lines: split it."
                return Checked(total, [BatchError("too_many_lines", message)])
            error = _error(line, endpoint, seen)
            if error:
                errors.append(error)
            if len(errors) == MAX_ERRORS:
                break
    except LineRefused as refused:
        errors.append(refused.error)
    if not total and not errors:
        errors.append(BatchError("empty_file", "The file holds no line."))
    return Checked(total, errors)


def is_done(bitmap: bytes, number: int) -> bool:
    """Bit 7 of byte 0 is line 0, as Redis has it."""
    byte = number // 8
    return byte < len(bitmap) and bool(bitmap[byte] & 0x80 >> number % 8)


def _error(line: InputLine, endpoint: str, seen: set[bytes]) -> BatchError | None:
    try:
        call = parse_line(line, endpoint)
    except LineRefused as refused:
        return refused.error
    digest = hashlib.blake2b(call.custom_id.encode(errors="surrogatepass"), digest_size=16).digest()
    if digest in seen:
        message = f"custom_id {call.custom_id!r} stands in an earlier line too."
        return BatchError("duplicate_custom_id", message, line.number + 1, "custom_id")
    seen.add(digest)
    return None


def _line(number: int, text: bytes, most_bytes: int) -> Iterator[InputLine]:
    _check_length(number, text, most_bytes)
    if text.strip():
        yield InputLine(number, text)


def _check_length(number: int, text: bytes, most_bytes: int) -> None:
    if len(text) > most_bytes:
        message = f"This line is longer than {most_bytes} bytes."
        raise _refused(InputLine(number, b""), "line_too_long", message)


def _refused(line: InputLine, code: str, message: str, param: str | None = None) -> LineRefused:
    return LineRefused(BatchError(code, message, line.number + 1, param))
