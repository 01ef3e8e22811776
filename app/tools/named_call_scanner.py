"""One call of a tool whose name stands before its arguments: `name[ARGS]{...}`."""

from app.tools.call_scanner import read_json
from app.tools.scanner import Scanner

_MOST_BEFORE = 160  # characters: a name, and an id that some write behind it
_ID = "[CALL_ID]"


class NamedCallScanner(Scanner):
    """`mark` stands between name and arguments."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self._mark = mark
        self._before = ""
        self._arguments = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def _read(self, char: str) -> None:
        if self.name is None:
            self._in_name(char)
        else:
            self._in_arguments(char)

    def _in_name(self, char: str) -> None:
        self._before += char
        if self._before.endswith(self._mark):
            self.name = self._before.removesuffix(self._mark).partition(_ID)[0].strip()
        else:
            self.broken = char in "{\n" or len(self._before) > _MOST_BEFORE

    def _in_arguments(self, char: str) -> None:
        if not self._arguments and char != "{":
            self.broken = not char.isspace()
            return
        self._arguments += char
        self._fresh += char
        if self._in_string:
            if not self._escaped and char == '"':
                self._in_string = False
            self._escaped = not self._escaped and char == "\\"
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if not self._depth:
                self._end()

    def _end(self) -> None:
        try:
            self.done = isinstance(read_json(self._arguments), dict)
        except (ValueError, RecursionError):
            self.done = False
        self.broken = not self.done
