"""One call of a tool as Python writes it: `name(city="Rome", days=[1, 2])`."""

import ast
import json
from typing import Any

from app.tools.call_scanner import read_json
from app.tools.scanner import Scanner

_MOST_NAME = 64  # characters
_MOST_DEPTH = 32  # of brackets
_NAMES_OF_JSON = {"true": True, "false": False, "null": None}


class PythonCallScanner(Scanner):
    """Each argument is told when it is whole."""

    def __init__(self) -> None:
        super().__init__()
        self._before = ""
        self._argument = ""
        self._told: set[str] = set()
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def _read(self, char: str) -> None:
        if self.name is None:
            self._in_name(char)
        elif self._quote:
            self._in_string(char)
        else:
            self._in_arguments(char)

    def _in_name(self, char: str) -> None:
        if char == "(":
            self.name, self._fresh = self._before, "{"
        self._before += char
        self.broken = self.name is None and not (
            (char.isalnum() or char in "_-.") and len(self._before) <= _MOST_NAME
        )

    def _in_string(self, char: str) -> None:
        self._argument += char
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == self._quote:
            self._quote = ""

    def _in_arguments(self, char: str) -> None:
        if not self._depth and char in ",)":
            self._end_argument(char)
            return
        self._argument += char
        if char in "\"'":
            self._quote = char
        elif char in "([{":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
        self.broken = self._depth not in range(_MOST_DEPTH)

    def _end_argument(self, char: str) -> None:
        if self._argument.strip() or char == ",":
            try:
                name, value = _read_argument(self._argument)
                shown = f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}"
            except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
                self.broken = True
                return
            self.broken = name in self._told
            self._fresh += f", {shown}" if self._told else shown
            self._told.add(name)
        self._argument = ""
        if char == ")" and not self.broken:
            self._fresh += "}"
            self.done = True


def _read_argument(argument: str) -> tuple[str, Any]:
    """Name and value, which may be written as in JSON. Raises SyntaxError, ValueError and others of `ast`."""
    name, _, text = (part.strip() for part in argument.partition("="))
    if not name.isidentifier():
        raise ValueError("no argument with its name")
    try:
        return name, read_json(text)
    except ValueError:
        return name, ast.literal_eval(_WithJson().visit(ast.parse(text, mode="eval")))


class _WithJson(ast.NodeTransformer):
    """Models write the constants of JSON in Python's lists and objects, too."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_NAMES_OF_JSON[node.id]) if node.id in _NAMES_OF_JSON else node
