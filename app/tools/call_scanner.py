"""One call of a tool as a JSON object: its name, and its arguments as they come."""

import json
from enum import Enum
from typing import Any, NoReturn

from app.tools.scanner import Scanner

_SPACE = " \t\n\r"
_NAMES = ("name",)
_ARGUMENTS = ("arguments", "parameters")


class _At(Enum):
    OPENING = 0
    KEY_OR_END = 1
    KEY = 2
    COLON = 3
    VALUE = 4
    IN_VALUE = 5
    COMMA_OR_END = 6


class CallScanner(Scanner):
    """Takes a JSON object of a name and arguments, whatever their order and whatever else it holds."""

    def __init__(self) -> None:
        super().__init__()
        self._at = _At.OPENING
        self._key = ""
        self._value = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._arguments: str | None = None

    def _read(self, char: str) -> None:
        if self._at is _At.IN_VALUE:
            self._in_value(char)
        elif self._at is _At.KEY:
            self._in_key(char)
        elif char not in _SPACE:
            self._between(char)

    def take_arguments(self) -> str:
        """As in any call; `{}` at the end of one without arguments."""
        fresh = super().take_arguments()
        if self.done and self._arguments is None:
            self._arguments = fresh = "{}"
        return fresh

    def _between(self, char: str) -> None:
        match self._at, char:
            case _At.OPENING, "{":
                self._at = _At.KEY_OR_END
            case _At.KEY_OR_END, '"':
                self._at, self._key = _At.KEY, char
            case _At.COLON, ":":
                self._at = _At.VALUE
            case _At.VALUE, _:
                self._at, self._value = _At.IN_VALUE, ""
                self._in_value(char)
            case _At.COMMA_OR_END, ",":
                self._at = _At.KEY_OR_END
            case ((_At.KEY_OR_END | _At.COMMA_OR_END), "}"):
                self.done, self.broken = self.name is not None, self.name is None
            case _:
                self.broken = True

    def _in_key(self, char: str) -> None:
        self._key += char
        if self._closes_string(char):
            self._at = _At.COLON

    def _in_value(self, char: str) -> None:
        if self._scalar and char in ",}" + _SPACE:
            self._end_value()
            if char not in _SPACE and not self.broken:
                self._between(char)
            return
        self._value += char
        if self._streams:
            self._fresh += char
        if self._in_string:
            if self._closes_string(char) and self._depth == 0:
                self._end_value()
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value()

    @property
    def _scalar(self) -> bool:
        return self._value != "" and self._value[0] not in '"{['

    @property
    def _streams(self) -> bool:
        """Arguments go out as they are written, unless a string holds their JSON."""
        return self._is(_ARGUMENTS) and self._value[0] == "{"

    def _is(self, keys: tuple[str, ...]) -> bool:
        return self._key[1:-1] in keys

    def _closes_string(self, char: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            return True
        return False

    def _end_value(self) -> None:
        self._at, self._depth = _At.COMMA_OR_END, 0
        try:
            value = read_json(self._value)
        except (ValueError, RecursionError):
            self.broken = True
            return
        if self._is(_NAMES):
            self.name, self.broken = value, not isinstance(value, str)
        elif self._is(_ARGUMENTS):
            self._end_arguments(value)

    def _end_arguments(self, value: object) -> None:
        if isinstance(value, str):
            self._fresh += value
            try:
                value = read_json(value)
            except (ValueError, RecursionError):
                value = None
        self._arguments = self._value
        self.broken = not isinstance(value, dict)


def read_json(text: str) -> Any:
    """Python's own reader takes NaN and Infinity too, which no client's would."""
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
