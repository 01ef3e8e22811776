"""Finds the calls of tools in an answer while it is written."""

from collections.abc import Collection
from enum import Enum
from typing import NamedTuple

from app.tools.call_scanner import CallScanner
from app.tools.tool_format import ToolFormat

_FILLERS = " \t\n\r,;[]"  # around and between calls


class Piece(NamedTuple):
    """What became certain: text, or of call `index` its name, or more of its arguments."""

    text: str = ""
    index: int = -1
    name: str | None = None
    arguments: str = ""


class _At(Enum):
    TEXT = 0
    BETWEEN_CALLS = 1
    IN_CALL = 2


class ToolParser:
    """Fed the same text in whatever pieces, it tells the same calls and the same text.

    What begins like a call and is none is text. Once the name of a call was told the call stays: what breaks
    it is told as text, and the parser is `broken`.
    """

    def __init__(self, form: ToolFormat, names: Collection[str], several: bool = True) -> None:
        """`names` of the tools there are. Unless `several`, calls behind the first are left out."""
        self.calls = 0
        self.broken = False
        self._form = form
        self._names = names
        self._several = several
        self._at = _At.TEXT
        self._fresh = True  # nothing was told yet
        self._held = ""  # not told yet: it may turn out to be text
        self._call = CallScanner()
        self._named = False  # the name of the current call was told

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        for char in text:
            self._held += char
            match self._at:
                case _At.TEXT:
                    pieces += self._in_text()
                case _At.BETWEEN_CALLS:
                    pieces += self._between_calls(char)
                case _At.IN_CALL:
                    pieces += self._in_call(char)
        return pieces

    def flush(self) -> list[Piece]:
        """The answer is over."""
        if self._at is _At.IN_CALL and self._named:
            self.broken = True
        if self.calls and not self._held.strip(_FILLERS):
            self._held = ""
        return self._tell(len(self._held))

    def _in_text(self) -> list[Piece]:
        """Hold back what may become a start mark, and the space before it."""
        start, bare = self._form.start, self._form.bare and self._fresh
        mark = self._held.lstrip()
        if mark == start or (bare and mark == "{"):
            self._at = _At.BETWEEN_CALLS
            return self._between_calls("{") if mark == "{" else []
        if start.startswith(mark):
            return []
        certain = len(self._held) - _overlap(self._held, start)
        return self._tell(len(self._held[:certain].rstrip()))

    def _between_calls(self, char: str) -> list[Piece]:
        behind = self._held.strip().removeprefix(self._form.start).strip(_FILLERS)
        if char == "{":
            self._at, self._call, self._named = _At.IN_CALL, CallScanner(), False
            return self._in_call(char)
        if behind and behind == self._form.end:
            self._at, self._held = _At.TEXT, ""
            return []
        if self._form.end.startswith(behind) or self._form.start.startswith(behind):
            return []
        return self._give_up()

    def _in_call(self, char: str) -> list[Piece]:
        call = self._call
        call.push(char)
        if call.broken or (call.name is not None and call.name not in self._names):
            self.broken |= self._named
            return self._give_up()
        if call.name is None:
            return []
        self._held = ""
        pieces = [] if self._named else [Piece(index=self.calls, name=call.name)]
        self._named = True
        if arguments := call.take_arguments():
            pieces.append(Piece(index=self.calls, arguments=arguments))
        told = self._several or self.calls == 0
        if call.done:
            self._at = _At.BETWEEN_CALLS
            self.calls += 1
        self._fresh = False
        return pieces if told else []

    def _give_up(self) -> list[Piece]:
        self._at = _At.TEXT
        return self._tell(len(self._held))

    def _tell(self, certain: int) -> list[Piece]:
        text, self._held = self._held[:certain], self._held[certain:]
        if not text:
            return []
        self._fresh = self._fresh and not text.strip()
        return [Piece(text)]


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    return next((n for n in range(min(len(text), len(mark)), 0, -1) if mark.startswith(text[-n:])), 0)
