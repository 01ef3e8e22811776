"""Input files of batches: lines, what is refused, and that a large one does not fill the memory."""

import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from app.batch.batch_input import MAX_ERRORS, MAX_LINES, InputLine, check, is_done, parse_line, read_lines
from relay.batches import BatchError

ENDPOINT = "/v1/completions"
MOST_BYTES = 10_000


def a_line(custom_id: Any = "a", **changes: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": {"prompt": "x"}} | changes


def encoded(*lines: Any) -> bytes:
    return b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)


def errors(*lines: Any) -> list[BatchError]:
    return check(read_lines([encoded(*lines)], MOST_BYTES), ENDPOINT).errors


@pytest.mark.parametrize("size", [1, 3, 1_000])
def test_lines_come_whole_from_pieces_of_any_size(size: int) -> None:
    text = b"one\n\ntwo\r\n \nthree"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    expected = [InputLine(0, b"one"), InputLine(2, b"two\r"), InputLine(4, b"three")]
    assert list(read_lines(pieces, MOST_BYTES)) == expected


def test_a_call() -> None:
    line = InputLine(0, encoded(a_line(body={"prompt": "é", "n": 2})))
    assert parse_line(line, ENDPOINT) == ("a", {"prompt": "é", "n": 2})


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        (b"[" * 5_000, "invalid_json_line", None),
        ([1], "invalid_json_line", None),
        (a_line(custom_id=7), "missing_required_parameter", "custom_id"),
        (a_line(""), "missing_required_parameter", "custom_id"),
        (a_line(method="GET"), "invalid_method", "method"),
        (a_line(url="/v1/embeddings"), "invalid_url", "url"),
        (a_line(body=[]), "missing_required_parameter", "body"),
        (a_line(body={"stream": True}), "invalid_request", "body"),
        (a_line(body={"background": True}), "invalid_request", "body"),
        (a_line("first"), "duplicate_custom_id", "custom_id"),
        (b"x" * (MOST_BYTES + 1), "line_too_long", None),
    ],
)
def test_what_is_refused_names_its_line(line: Any, code: str, param: str | None) -> None:
    (error,) = errors(a_line("first"), b"", line)
    assert (error.code, error.line, error.param) == (code, 3, param)


def test_a_long_line_is_refused_before_it_is_read_whole() -> None:
    def pieces() -> Iterator[bytes]:
        yield b"x" * (MOST_BYTES + 1)
        raise AssertionError("read on")

    (error,) = check(read_lines(pieces(), MOST_BYTES), ENDPOINT).errors
    assert (error.code, error.line) == ("line_too_long", 1)


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_file(content: bytes) -> None:
    (error,) = check(read_lines([content], MOST_BYTES), ENDPOINT).errors
    assert (error.code, error.line) == ("empty_file", None)


def test_only_so_many_errors_are_listed() -> None:
    assert len(errors(*[b"{"] * (MAX_ERRORS + 5))) == MAX_ERRORS


def many(count: int, piece_lines: int = 500) -> Iterator[bytes]:
    for start in range(0, count, piece_lines):
        ids = range(start, min(start + piece_lines, count))
        yield b"".join(encoded(a_line(str(i), body={"prompt": "x" * 2_000})) + b"\n" for i in ids)


def test_the_most_lines_are_checked_in_little_memory() -> None:
    tracemalloc.start()
    checked = check(read_lines(many(MAX_LINES), MOST_BYTES), ENDPOINT)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert checked == (MAX_LINES, [])
    assert peak_bytes < 16 << 20, "of a file of 100 MB"


def test_one_line_too_many() -> None:
    (error,) = check(read_lines(many(MAX_LINES + 1), MOST_BYTES), ENDPOINT).errors
    assert error.code == "too_many_lines"


def test_which_lines_are_done() -> None:
    bitmap = bytes([0b1000_0001, 0b0100_0000])
    assert [number for number in range(40) if is_done(bitmap, number)] == [0, 7, 9]
