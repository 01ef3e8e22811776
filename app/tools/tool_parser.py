"""Finds the calls of tools in an answer while it is written."""

import re
from collections.abc import Collection
from enum import Enum
from typing import NamedTuple

from app.tools.call_scanner import CallScanner
from app.tools.named_call_scanner import NamedCallScanner
from app.tools.python_call_scanner import PythonCallScanner
from app.tools.scanner import Scanner
from app.tools.tool_format import ToolFormat

_FILLERS = " \t\n\r,;[]"  # around and between calls
_ENDINGS = re.compile(r"(\s*[,;\]])*")  # of a call in a list


class Piece(NamedTuple):
    """What became certain: text, or of call number `call` its name, or more of its arguments."""

    text: str = ""
    call: int = -1
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
        self._passed = 0  # characters of that which may stand before a call, and are no part of one
        self._call: Scanner = CallScanner()
        self._named = False  # the name of the current call was told
        self._after_call = False  # what is held stands behind a call

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
        if self._after_call and self._form.end.startswith(self._unknown()):
            self._hold("")
        if self.calls and not self._held.strip():
            self._hold("")
        return self._tell(len(self._held))

    def _in_text(self) -> list[Piece]:
        """Hold back what may become a start mark, and the space before it."""
        start, bare = self._form.start, self._form.bare and self._fresh
        if self._form.leads and not self._fresh:
            return self._tell(len(self._held))
        mark = self._held.lstrip()
        if mark == start or (bare and mark == "{"):
            self._at, self._after_call = _At.BETWEEN_CALLS, False
            return self._between_calls("{") if mark == "{" else []
        if start.startswith(mark):
            return []
        certain = len(self._held) - _overlap(self._held, start)
        return self._tell(len(self._held[:certain].rstrip()))

    def _between_calls(self, char: str) -> list[Piece]:
        if char == "{" and not self._form.named and not self._form.python:
            return self._begin_call(CallScanner(), char)
        unknown, end = self._unknown(), self._form.end
        if self._after_call and unknown and unknown == end:
            self._at, self._after_call = _At.TEXT, False
            self._hold("")
            return []
        if self._form.start.startswith(unknown) or (self._after_call and end.startswith(unknown)):
            return []
        if self._form.named and self._form.start in self._held:
            return self._begin_call(NamedCallScanner(self._form.named), char)
        if self._form.python and self._in_list():
            return self._begin_call(PythonCallScanner(), char)
        return self._give_up()

    def _in_list(self) -> bool:
        """What is held stands in a list, behind its beginning or a comma."""
        if self._form.start in self._held:
            return True
        return self._after_call and "," in self._held and "]" not in self._held

    def _begin_call(self, scanner: Scanner, char: str) -> list[Piece]:
        self._at, self._call, self._named = _At.IN_CALL, scanner, False
        return self._in_call(char)

    def _unknown(self) -> str:
        """What is held, behind all that may stand before a call: each character is looked at once, since a
        model may write fillers for ever."""
        start, end = self._form.start, self._form.end
        while rest := self._held[self._passed :]:
            if rest.startswith(start):
                self._passed += len(start)
            elif rest[0] not in _FILLERS or start.startswith(rest) or end.startswith(rest):
                break
            else:
                self._passed += 1
        return rest

    def _in_call(self, char: str) -> list[Piece]:
        call = self._call
        call.push(char)
        if call.broken or (call.name is not None and call.name not in self._names):
            self.broken |= self._named
            return self._give_up()
        if call.name is None:
            return []
        self._hold("")
        pieces = [] if self._named else [Piece(call=self.calls, name=call.name)]
        self._named = True
        if arguments := call.take_arguments():
            pieces.append(Piece(call=self.calls, arguments=arguments))
        told = self._several or self.calls == 0
        self._after_call = call.done
        if call.done:
            self._at = _At.BETWEEN_CALLS
            self.calls += 1
        self._fresh = False
        return pieces if told else []

    def _hold(self, text: str) -> None:
        self._held, self._passed = text, 0

    def _give_up(self) -> list[Piece]:
        self._at = _At.TEXT
        return self._tell(len(self._held))

    def _tell(self, certain: int) -> list[Piece]:
        if certain and self._after_call:
            before = len(self._held)
            self._hold(_ENDINGS.sub("", self._held, count=1))
            self._after_call = False
            certain -= before - len(self._held)
        text = self._held[:certain]
        self._hold(self._held[certain:])
        if not text:
            return []
        self._fresh = self._fresh and not text.strip()
        return [Piece(text)]


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    return next((n for n in range(min(len(text), len(mark)), 0, -1) if mark.startswith(text[-n:])), 0)
