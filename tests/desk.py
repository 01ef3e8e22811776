"""A desk for the legs of a role: it records what they do, and a scripted server answers their calls."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from redis.exceptions import ConnectionError

from relay.answers import Moved
from relay.geometry import Geometry
from relay.request import Claimed, Hold, Leg, Ring
from relay.rooms import Rooms
from relay.sampling import SamplingParams
from relay.server_clock import ServerClock
from relay.settings import Settings
from relay.worker_card import Incarnation, Load, WorkerCard
from workers.calls import Calls
from workers.engine.messages import Command, Computed, Drop, Prebuilt, Prefill, Reserve
from workers.transfer.base import (
    Destination,
    Handshakes,
    KVManager,
    KVReceiver,
    KVSender,
    RowsExhausted,
    Seal,
    TransferEvent,
)

T = TypeVar("T")

GEOMETRY = Geometry("print", "float32", 1, 1, 8, 16, 100)
OK, STALE = Moved(True, []), Moved(False, [])


@dataclass(eq=False)
class Task:
    """A Celery task, and how it ended."""

    request_id: str
    ends: list[str] = field(default_factory=list)
    beside: list["Task"] = field(default_factory=list)

    def succeed(self, result: str) -> None:
        self.ends.append(f"ok: {result}")

    def fail(self, error: str) -> None:
        self.ends.append(f"failed: {error}")

    def fork(self, request_id: str) -> "Task":
        self.beside.append(Task(request_id))
        return self.beside[-1]


class ScriptedRooms:
    """Every call is recorded, then answered: from `replies` by name, else as a server that agrees."""

    def __init__(self) -> None:
        self.called: list[tuple[str, Any]] = []
        self.replies: dict[str, Any] = {}
        self.away = False
        self.lose_reply = False  # of the next call: the server obeys, but nobody hears

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if self.away:
                raise ConnectionError("nobody listens")
            self.called.append((name, args))
            if self.lose_reply:
                self.lose_reply = False
                raise ConnectionError("connection reset")
            reply = self.replies.get(name, OK if name in {"publish", "release", "fail", "kv_ready"} else None)
            if isinstance(reply, Exception):
                raise reply
            return reply

        return call

    def names(self) -> list[str]:
        return [name for name, _ in self.called]

    def args(self, name: str) -> Any:
        """Of the last call of that name."""
        return next(args for called, args in reversed(self.called) if called == name)


class Sender(KVSender):
    def __init__(self) -> None:
        self.destination: Destination | None = None
        self.sealed: list[Seal] = []
        self.parts: list[Computed] = []
        self.closed = False

    def bootstrap(self, destination: Destination, peer_metadata: bytes, peer: Geometry) -> None:
        GEOMETRY.check(peer)
        assert not self.closed
        self.destination = destination

    def computed(self, part: Computed) -> None:
        self.parts.append(part)

    def seal(self, seal: Seal) -> None:
        self.sealed.append(seal)

    def close(self) -> None:
        self.closed = True


class Receiver(KVReceiver):
    """What a peer wrote into its row is `written`."""

    def __init__(self, manager: "Manager", room: int, row: int) -> None:
        self._manager, self._room, self._row = manager, room, row
        self.written: Seal | None = None
        self.digest_matches = True
        self.released: bool | None = None  # whether into quarantine

    @property
    def row(self) -> int:
        return self._row

    def read(self) -> Seal | None:
        assert self.released is None
        return self.written

    def verify(self, seal: Seal, pages: Sequence[int]) -> bool:
        return self.digest_matches

    def release(self, quarantine: bool) -> None:
        assert self.released is None, "a row is released once"
        self.released = quarantine
        if quarantine:
            self._manager.quarantined.setdefault(self._room, []).append(self._row)
        else:
            self._manager.free_rows.append(self._row)


class Manager(KVManager):
    """Rows that are free or not, and senders that only remember."""

    def __init__(self, rows: int = 4) -> None:
        self.free_rows = list(range(rows))
        self.quarantined: dict[int, list[int]] = {}
        self.senders: dict[int, Sender] = {}
        self.receivers: dict[int, Receiver] = {}
        self.forgotten: list[str] = []
        self.greeted: list[bytes] = []
        self.greeted_by = 0
        self.deadline_s = math.inf

    @property
    def agent_metadata(self) -> bytes:
        return b"agent"

    @property
    def handshakes(self) -> Handshakes:
        return Handshakes()

    def start(self, on_event: Callable[[TransferEvent], None]) -> None:
        raise AssertionError("there is no thread here")

    def sender(self, room: int, key: str, pages: Sequence[int]) -> Sender:
        assert room not in self.senders
        self.senders[room] = Sender()
        return self.senders[room]

    def receiver(self, room: int, far: bool = False) -> Receiver:
        if not self.free_rows:
            raise RowsExhausted("no row")
        self.receivers[room] = Receiver(self, room, self.free_rows.pop())
        return self.receivers[room]

    def proven(self, room: int) -> None:
        self.free_rows += self.quarantined.pop(room, [])

    def posts_until(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s

    def greet_peer(self, metadata: bytes, geometry: Geometry) -> None:
        GEOMETRY.check(geometry)
        self.greeted.append(metadata)

    def be_greeted(self) -> None:
        self.greeted_by += 1

    def forget_peer(self, boot: str) -> None:
        self.forgotten.append(boot)

    def stop(self) -> None:
        raise AssertionError("there is no thread here")


class RecordingDesk:
    """Implements `legs.Desk`. Calls run when the test says `flush`."""

    def __init__(self, **settings: Any) -> None:
        self.settings = Settings(**settings)
        self.server = ScriptedRooms()
        self.rooms = cast(Rooms, self.server)
        self.kv = Manager()
        self.manager: KVManager = self.kv
        self.boot = "here"
        self.total_pages = 100
        self.capacity_tokens = 1600
        self.room_tokens = 1600
        self.calls = Calls()
        self.told: list[Command] = []
        self.rung: list[Ring] = []
        self.met: list[str] = []
        self.peers = {boot: card(boot) for boot in ("P", "D")}

    @property
    def away(self) -> bool:
        return self.calls.away

    def call(self, call: Callable[[], T], then: Callable[[T | None], None]) -> None:
        self.calls.add(call, then)

    def ring(self, bell: Ring) -> None:
        self.rung.append(bell)

    def tell(self, command: Command) -> None:
        """A leg that was dropped is never spoken of again."""
        if isinstance(command, Reserve | Prefill | Prebuilt):
            assert _key(command) not in self.dropped, f"{command} after its Drop"
        self.told.append(command)

    def peer(self, boot: str) -> WorkerCard | None:
        return self.peers.get(boot)

    def meet(self, boots: Collection[str]) -> None:
        self.met = list(boots)

    def room_for(self, tokens: int) -> int:
        return self.room_tokens // tokens

    def fork(self, task: Any, request_id: str) -> Any:
        return task.fork(request_id)

    def done(self, task: Any, result: str) -> None:
        task.succeed(result)

    def failed(self, task: Any, error: str) -> None:
        task.fail(error)

    # ---- what a test says and asks

    def flush(self) -> None:
        self.calls._retry_at = 0.0  # no test waits
        self.calls.flush(until=math.inf)

    @property
    def dropped(self) -> Counter[str]:
        return Counter(command.key for command in self.told if isinstance(command, Drop))


def _key(command: Reserve | Prefill | Prebuilt) -> str:
    return command.key if isinstance(command, Prebuilt) else command.work.key


def card(boot: str, role: str = "decode", geometry: Geometry = GEOMETRY) -> WorkerCard:
    load = Load(4, 1600, 0, 0, 100, 0, 0, 0)
    return WorkerCard(Incarnation.here(boot), f"{role}@host", role, geometry, 1600, b"agent", load)


def kill(peer: WorkerCard) -> WorkerCard:
    """The same worker, as it looks once its process is gone."""
    return peer._replace(incarnation=peer.incarnation._replace(start_ticks=1))


def claimed(leg: Leg, number: int = 1, tokens: int = 20, emitted: Sequence[int] = (), **more: Any) -> Claimed:
    fields: dict[str, Any] = {
        "hold": Hold(f"req_{number}", leg, 1, f"{number:032x}"),
        "room": 1000 + number if leg is not Leg.BOTH else 0,
        "attempt": 1,
        "solo": False,
        "prompt_ids": tuple(range(tokens)),
        "emitted": tuple(emitted),
        "params": SamplingParams(max_tokens=16),
        "prefill_boot": "P" if leg is Leg.DECODE else None,
        "left_ms": 60_000.0,
        "submitted_ms": float(number),
        "clock": ServerClock(0.0, 0.0),
    }
    return Claimed(**fields | more)
