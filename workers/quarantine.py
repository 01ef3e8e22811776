"""Rooms whose published pages a peer might still write: put aside until there is proof that it cannot."""

from typing import NamedTuple

from relay.worker_card import Incarnation

ASK_EVERY_S = 1.0


class Suspect(NamedTuple):
    room: int
    writer: Incarnation
    pages: int
    since: float


class Quarantine:
    """Owned by the control thread; times are monotonic seconds."""

    def __init__(self) -> None:
        self._suspects: dict[int, Suspect] = {}
        self._asked_at = 0.0

    def __len__(self) -> int:
        return len(self._suspects)

    @property
    def pages(self) -> int:
        return sum(suspect.pages for suspect in self._suspects.values())

    def oldest_age_s(self, now: float) -> float:
        return max((now - suspect.since for suspect in self._suspects.values()), default=0.0)

    def add(self, suspect: Suspect) -> None:
        self._suspects[suspect.room] = suspect

    def prove(self, room: int) -> bool:
        """True when the room was in quarantine and is proven now."""
        return self._suspects.pop(room, None) is not None

    def proven_dead(self) -> list[Suspect]:
        return [suspect for suspect in self._suspects.values() if suspect.writer.proven_dead()]

    def to_ask(self, now: float) -> list[Suspect]:
        """The rooms whose writer is asked again now; each at most once a second."""
        if now - self._asked_at < ASK_EVERY_S:
            return []
        self._asked_at = now
        return list(self._suspects.values())
