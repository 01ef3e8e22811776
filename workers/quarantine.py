"""Rooms whose published pages a peer might still write: put aside until there is proof that it cannot."""

from collections.abc import Collection
from typing import NamedTuple

from relay.worker_card import Incarnation

ASK_EVERY_S = 1.0
PATIENCE_S = 30.0  # it comes within two; after a cut cable of ten, TCP goes on within thirteen more


class Unproven(NamedTuple):
    """Pages that a write may still touch, since when (monotonic seconds)."""

    pages: int
    since: float


class Suspect(NamedTuple):
    room: int
    writer: Incarnation
    pages: int
    since: float


class Quarantine:
    """Owned by the control thread; times are monotonic seconds."""

    def __init__(self) -> None:
        self._suspects: dict[int, Suspect] = {}
        self._dead: set[int] = set()  # rooms whose writer was seen to be dead
        self._asked_at = 0.0

    def __len__(self) -> int:
        return len(self._suspects)

    @property
    def unproven(self) -> list[Unproven]:
        return [Unproven(suspect.pages, suspect.since) for suspect in self._suspects.values()]

    def add(self, suspect: Suspect) -> None:
        """A room comes twice when the first publish of it was lost on its way, and it was claimed again."""
        known = self._suspects.get(suspect.room)
        if known is not None:
            suspect = known._replace(pages=known.pages + suspect.pages)
        self._suspects[suspect.room] = suspect

    def prove(self, room: int) -> Suspect | None:
        """What was in quarantine and is proven now, if anything."""
        self._dead.discard(room)
        return self._suspects.pop(room, None)

    def saw_dead(self, room: int) -> bool:
        """Its writer is seen to be dead. True from the second time on: over TCP the kernel may hold what the
        dead process had sent, and this side has looked for it since the first."""
        again = room in self._dead
        self._dead.add(room)
        return again

    def to_ask(self, now: float) -> list[Suspect]:
        """The rooms whose writer is asked again now; each at most once a second."""
        if now - self._asked_at < ASK_EVERY_S:
            return []
        self._asked_at = now
        return list(self._suspects.values())


def restart_helps(
    unproven: Collection[Unproven], total_pages: int, share: float, age_s: float, now: float
) -> bool:
    """So much of the pool waits for proof, or some of it for so long, that only the end of the process gives
    it back. What began to wait a moment ago does not count: many requests may end at once."""
    waits = [each for each in unproven if now - each.since > PATIENCE_S]
    too_much = sum(each.pages for each in waits) > share * total_pages
    return too_much or any(now - each.since > age_s for each in unproven)
