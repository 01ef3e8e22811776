"""Faults inside a worker: wraps what reaches beyond its process, so that the worker itself knows of none.

The folder in FAULTS holds the armed faults: `<wave>.armed` with one JSON line per fault; a new wave starts
new counts. A fault that happens leaves `<wave>.<number>.happened`, which also makes it happen only once,
whoever comes by.
"""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from redis.exceptions import ConnectionError

from relay.answers import Emission, Emitted, Forked, Moved, Prefilled, Renewed, Transfer
from relay.mailbox import Mail, Mailbox
from relay.request import Hold, Leg
from relay.rooms import Rooms
from tests.chaos.faults import Fault, Kind, When
from workers.transfer.peer import Peer
from workers.transfer.runs import IndexArray
from workers.transfer.transport import Handle, Table, Transport

T = TypeVar("T")
COPIES = 3


class Dropped(ConnectionError):
    """The call, or its reply, is lost."""


class Injector:
    """Any thread may pass by."""

    def __init__(self, folder: Path, role: str) -> None:
        self._folder = folder
        self._role = role
        self._lock = threading.Lock()
        self._wave = ""
        self._faults: list[Fault] = []
        self._marks: dict[Fault, Path] = {}
        self._seen: Counter[str] = Counter()

    def due(self, transition: str) -> Fault | None:
        """The fault that happens to this passing of `transition`."""
        with self._lock:
            self._load()
            self._seen[transition] += 1
            passing = (self._role, transition, self._seen[transition])
            for fault in self._faults:
                if (fault.role, fault.transition, fault.occurrence) == passing and self._first(fault):
                    return fault
        return None

    def around(self, transition: str, call: Callable[[], T]) -> T:
        """Make an idempotent call whose loss shows as a lost connection."""
        fault = self.due(transition)
        if fault is None:
            return call()
        if fault.kind is Kind.DUPLICATE:
            self._note(fault)
            return [call() for _ in range(COPIES)][-1]
        if fault.when is When.BEFORE:
            self._strike(fault)
            return call()
        reply = call()
        self._strike(fault)
        return reply

    def copies(self, transition: str) -> int:
        """How often a message gets through: once, after whatever happens to the process, if it is not
        lost."""
        fault = self.due(transition)
        if fault is None:
            return 1
        if fault.kind in (Kind.DUPLICATE, Kind.DROP):
            self._note(fault)
            return COPIES if fault.kind is Kind.DUPLICATE else 0
        self._strike(fault)
        return 1

    def _load(self) -> None:
        armed = max(self._folder.glob("*.armed"), default=None)
        if armed is None or armed.stem == self._wave:
            return
        self._wave = armed.stem
        self._faults = [Fault.from_json(line) for line in armed.read_text().splitlines()]
        self._seen.clear()

    def _first(self, fault: Fault) -> bool:
        mark = self._folder / f"{self._wave}.{fault.number}.happened"
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            return False
        self._marks[fault] = mark
        return True

    def _note(self, fault: Fault) -> None:
        """It happens now."""
        self._marks[fault].write_text(f"{os.getpid()} {time.time()}\n")

    def _strike(self, fault: Fault) -> None:
        self._note(fault)
        match fault.kind:
            case Kind.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Kind.STOP:
                # To this thread, so that it is the first to stop: it must not get on.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            case Kind.DELAY:
                time.sleep(fault.seconds)
            case Kind.DROP:
                raise Dropped(str(fault))
            case Kind.DUPLICATE:
                raise AssertionError("only the caller can repeat a call")


class FaultyRooms(Rooms):
    def __init__(self, url: str, model: str, injector: Injector) -> None:
        super().__init__(url, model)
        self._injector = injector

    def claim(self, *args: Any) -> Any:
        return self._injector.around("claim", lambda: super(FaultyRooms, self).claim(*args))

    def publish(self, hold: Hold, room: int, pages: Sequence[int], row: int, first_page: int = 0) -> Moved:
        return self._injector.around(
            "publish", lambda: super(FaultyRooms, self).publish(hold, room, pages, row, first_page)
        )

    def kv_ready(self, hold: Hold, room: int, prefilled: Prefilled, transfer: Transfer) -> Moved:
        return self._injector.around(
            "kv_ready", lambda: super(FaultyRooms, self).kv_ready(hold, room, prefilled, transfer)
        )

    def emit(self, batch: Sequence[Emission]) -> list[Emitted]:
        def emit() -> list[Emitted]:
            return super(FaultyRooms, self).emit(batch)

        def finish() -> list[Emitted]:
            return self._injector.around("finish", emit)

        ends = any(emission.finish is not None for emission in batch)
        return self._injector.around("emit", finish if ends else emit)

    def claim_forks(self, hold: Hold, boot: str, lease_ms: int, nonces: Sequence[str]) -> Forked:
        return self._injector.around(
            "claim_forks", lambda: super(FaultyRooms, self).claim_forks(hold, boot, lease_ms, nonces)
        )

    def release(self, *args: Any) -> Moved:
        return self._injector.around("release", lambda: super(FaultyRooms, self).release(*args))

    def renew(self, *args: Any) -> Renewed:
        return self._injector.around("renew", lambda: super(FaultyRooms, self).renew(*args))

    def ask(self, writer_boot: str, room: int, asker_boot: str) -> None:
        self._injector.around("ask", lambda: super(FaultyRooms, self).ask(writer_boot, room, asker_boot))

    def settle(self, room: int, asker_boot: str) -> None:
        self._injector.around("settle", lambda: super(FaultyRooms, self).settle(room, asker_boot))


class FaultyMailbox(Mailbox):
    def __init__(self, url: str, model: str, boot: str, injector: Injector) -> None:
        super().__init__(url, model, boot)
        self._injector = injector

    def read(self, *args: Any) -> list[Mail]:
        return [
            mail
            for mail in super().read(*args)
            for _ in range(self._injector.copies(f"mail.{type(mail).__name__.lower()}"))
        ]


class FaultyTransport(Transport):
    """Between deciding to post and the post itself nothing is checked any more."""

    def __init__(self, transport: Transport, injector: Injector) -> None:
        self._transport = transport
        self._injector = injector
        self._rows: set[int] = set()  # handles that write a metadata row, by id
        self.name = transport.name

    @property
    def contact(self) -> bytes:
        return self._transport.contact

    def begin(self) -> None:
        self._transport.begin()

    def connect(self, peer: Peer) -> None:
        self._transport.connect(peer)

    def greet(self, boot: str) -> None:
        self._transport.greet(boot)

    def make(self, boot: str, table: Table, local: IndexArray, remote: IndexArray) -> Handle:
        handle = self._transport.make(boot, table, local, remote)
        if table is Table.ROWS:
            self._rows.add(id(handle))
        return handle

    def post(self, handle: Handle) -> bool:
        what = "post.row" if id(handle) in self._rows else "post"
        return self._injector.around(what, lambda: self._transport.post(handle))

    def check(self, handle: Handle) -> bool:
        return self._transport.check(handle)

    def release(self, handle: Handle) -> None:
        self._rows.discard(id(handle))
        self._transport.release(handle)

    def progress(self) -> None:
        self._transport.progress()

    def forget(self, boot: str) -> None:
        self._transport.forget(boot)

    def close(self) -> None:
        self._transport.close()


def ring_transition(leg: Leg) -> str:
    return f"ring.{leg}"
