"""Gets the proof that no peer writes any more into what is in quarantine, and frees it then."""

import logging
import time
from collections.abc import Collection
from functools import partial

from relay.log import event
from relay.worker_card import Incarnation
from workers.engine.messages import Proven
from workers.legs import Desk, ignore
from workers.meters import Meters
from workers.quarantine import Quarantine, Suspect, Unproven

log = logging.getLogger(__name__)


class Proofs:
    """Owned by the control thread. By room: the engine has its pages, the manager its metadata rows."""

    def __init__(self, desk: Desk, meters: Meters) -> None:
        self._desk = desk
        self._meters = meters
        self._quarantine = Quarantine()

    def __len__(self) -> int:
        """Rooms that wait."""
        return len(self._quarantine)

    @property
    def unproven(self) -> Collection[Unproven]:
        return self._quarantine.unproven

    def need(self, room: int, writer: Incarnation, pages: int) -> None:
        """So many pages of this room were published, and its leg has ended before the seal."""
        self._quarantine.add(Suspect(room, writer, pages, time.monotonic()))

    def settled(self, room: int) -> None:
        """Its writer says so, or is dead."""
        suspect = self._quarantine.prove(room)
        if suspect is None:
            return
        self._desk.tell(Proven(room))
        self._desk.manager.proven(room)
        waited_s = time.monotonic() - suspect.since
        self._meters.proven(waited_s)
        event(log, "quarantine_proven", room=room, waited_s=waited_s)

    def ask(self, now: float) -> None:
        """Each writer once a second; of a dead one nobody has to be asked."""
        for suspect in self._quarantine.to_ask(now):
            if suspect.writer.proven_dead():
                if self._quarantine.saw_dead(suspect.room):
                    self._desk.manager.forget_peer(suspect.writer.boot)
                    self.settled(suspect.room)
            elif not self._desk.away:  # else the questions of a long outage would pile up
                ask = partial(self._desk.rooms.ask, suspect.writer.boot, suspect.room, self._desk.boot)
                self._desk.call(ask, ignore)
