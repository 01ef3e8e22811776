"""A file of turns, to which every run adds."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.peers.turn import Turn


class Results:
    def __init__(self, path: Path) -> None:
        """Raises ValueError for a file that is no list of turns."""
        self._path = path
        self.turns: list[Turn] = []
        if path.exists():
            try:
                self.turns = [Turn(**turn) for turn in json.loads(path.read_text())]
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{path} holds no turns ({error}): name another file with --results"
                ) from error

    def add(self, turn: Turn) -> None:
        """Written at once: a run may be interrupted."""
        self.turns.append(turn)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps([kept.to_json() for kept in self.turns], indent=1))
        partial.replace(self._path)


def systems(turns: Iterable[Turn]) -> list[str]:
    """In the order of their first turn."""
    return list(dict.fromkeys(turn.system for turn in turns))


def loads(turns: Iterable[Turn]) -> list[int]:
    """Numbers of clients, ascending."""
    return sorted({turn.clients for turn in turns})


def of(turns: Iterable[Turn], system: str, clients: int) -> Sequence[Turn]:
    return [turn for turn in turns if turn.system == system and turn.clients == clients]
