"""One call of a tool, read character by character, however a family of models writes it."""

from abc import ABC, abstractmethod


class Scanner(ABC):
    """`name` is None until it is known. `done` after the last character, `broken` once it is no call."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = False
        self.broken = False
        self._fresh = ""  # of the arguments, as JSON

    def push(self, char: str) -> None:
        assert not self.done
        assert not self.broken
        self._read(char)

    def take_arguments(self) -> str:
        """What came of the arguments since the last time, as JSON."""
        fresh, self._fresh = self._fresh, ""
        return fresh

    @abstractmethod
    def _read(self, char: str) -> None:
        """The next character."""
