"""The control thread as a whole, with a scripted server and an engine that only listens."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import pytest

from relay.answers import Claim, Kept, Lost, Renewed, Waiting
from relay.mailbox import Ended, Ready
from relay.request import Hold, Leg, Ring
from relay.rooms import Rooms
from relay.settings import Settings
from relay.stamps import Stamps
from relay.worker_card import Load, WorkerCard
from tests.decode_rig import Output, reserved
from tests.desk import Manager, ScriptedRooms, Task, card, claimed
from tests.meters import meters
from tests.processes import until
from workers import drain, leases
from workers.control import Abort, Control, Order
from workers.decode import DecodeLegs
from workers.doorbell import Doorbell
from workers.engine.engine import Engine
from workers.engine.messages import Command, Crashed, Drop, Headroom, Heartbeat, Reserve
from workers.output import OutputThread

HEADROOM = Headroom(1600, 1600, 0, 0, 100, 0, 0, 0, 100, admitted=0)
DEADLINE_S = 10.0


class EngineEar:
    """Where the engine is: it hears commands."""

    def __init__(self) -> None:
        self.headroom = HEADROOM
        self.heartbeat = Heartbeat(0, None)
        self.heard: list[Command] = []

    def submit(self, command: Command) -> None:
        self.heard.append(command)


class Server(ScriptedRooms):
    """Grants each claim in `grants` once, and keeps every leg in `renew` but those in `gone`."""

    def __init__(self) -> None:
        super().__init__()
        self.grants: list[Claim] = []
        self.gone: dict[str, str] = {}

    def claim(self, *args: Any) -> Claim | None:
        self.replies["claim"] = self.grants[0] if self.grants else None
        reply = self.__getattr__("claim")(*args)
        if reply:
            self.grants.pop(0)
        return cast(Claim | None, reply)

    def waiting(self, leg: Leg) -> Waiting:
        self.replies["waiting"] = Waiting(len(self.grants), retracted=False)
        return cast(Waiting, self.__getattr__("waiting")(leg))

    def renew(
        self, boot: str, load: Load, holds: list[Hold], lease_ms: int, progress: Mapping[str, Stamps]
    ) -> Renewed:
        self.__getattr__("renew")(boot, load, tuple(holds), lease_ms)
        kept = [Kept(hold, _STATE, None) for hold in holds if hold.nonce not in self.gone]
        lost = [Lost(hold, self.gone[hold.nonce]) for hold in holds if hold.nonce in self.gone]
        return Renewed(True, b"1", kept, lost, [], [])

    def workers(self) -> list[WorkerCard]:
        return [card("P")]


_STATE = cast(Any, "prefill")


class Worker:
    def __init__(self, **settings: Any) -> None:
        self.server = Server()
        self.engine = EngineEar()
        self.output = Output()
        self.kv = Manager()
        self.rung: list[Ring] = []
        self.crashes: list[BaseException] = []
        self.full = 0
        self.control = Control(
            "here",
            Settings(**settings),
            cast(Rooms, self.server),
            cast(Engine, self.engine),
            self.kv,
            lambda desk: DecodeLegs(desk, cast(OutputThread, self.output), meters()),
            lambda load: card("here"),
            self.rung.append,
            self.crashes.append,
            self._on_full,
        )

    def _on_full(self) -> None:
        self.full += 1

    def ring(self, number: int = 1) -> Task:
        task = Task(f"req_{number}")
        self.server.grants.append(Claim(claimed(Leg.DECODE, number), []))
        self.control.put(Doorbell(task.request_id, Leg.DECODE, task))
        return task

    def reserved(self, count: int = 1) -> None:
        self.wait(lambda: self.heard(Reserve) == count, "the leg is claimed")

    def heard(self, kind: type[Command]) -> int:
        return sum(isinstance(command, kind) for command in self.engine.heard)

    @staticmethod
    def wait(holds: Callable[[], object], what: str) -> None:
        until(holds, what, DEADLINE_S)


@pytest.fixture
def start() -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def start(**settings: Any) -> Worker:
        workers.append(Worker(**settings))
        workers[-1].control.start()
        return workers[-1]

    yield start
    for worker in workers:
        worker.control.put(Order.STOP)
        worker.control.join(DEADLINE_S)
    names = [thread.name for thread in threading.enumerate()]
    assert "control" not in names


Start = Callable[..., Worker]


def test_a_stuck_engine_claims_nothing(start: Start) -> None:
    worker = start()
    worker.engine.heartbeat = Heartbeat(1, time.monotonic() - 1)
    task = worker.ring()
    for rounds in (1, 2):
        worker.control.put(Abort(task))
        worker.wait(lambda n=rounds: worker.server.names().count("cancel") == n, "a round went by")  # type: ignore[misc]
    assert "claim" not in worker.server.names()
    assert worker.control.spare == 0

    worker.engine.heartbeat = Heartbeat(1, None)
    worker.reserved()
    assert task.ends == []


def test_forks_are_bounded_by_pages_by_tasks_and_by_what_ails_the_worker(start: Start) -> None:
    worker = start(max_running=3)
    control, task = worker.control, Task("req_1")
    assert control.room_for(800) == 2
    assert control.room_for(1) == 3
    fork = control.fork(task, "req_2")
    assert task.beside == [fork]
    assert (control.active, control.room_for(1)) == (1, 2)
    control.done(fork, "stop")
    assert (control.active, control.room_for(1)) == (0, 3)
    worker.engine.headroom = HEADROOM._replace(free_tokens=0)
    assert control.room_for(1) == 0
    worker.engine.headroom = HEADROOM
    worker.engine.heartbeat = Heartbeat(1, time.monotonic() - 1)
    assert control.room_for(1) == 0, "its legs will be taken from it"
    worker.engine.heartbeat = Heartbeat(1, None)
    control.put(Order.DRAIN)
    worker.wait(lambda: control.room_for(1) == 0, "who drains takes nothing on")


def test_a_doorbell_becomes_a_leg_and_ends_with_it(start: Start) -> None:
    worker = start()
    task = worker.ring()
    worker.reserved()
    assert worker.control.active == 1
    leg = claimed(Leg.DECODE)
    worker.control.put(reserved(leg))
    worker.wait(lambda: "publish" in worker.server.names(), "its pages are published")
    worker.control.put(Ended("req_1", leg.room, Leg.DECODE, "cancelled", leg.hold.nonce))
    worker.wait(lambda: task.ends == ["ok: cancelled"], "its task ends")
    assert worker.control.active == 0
    worker.wait(lambda: "ask" in worker.server.names(), "the writer is asked")


def test_a_renewal_lists_what_is_owned_and_drops_what_is_lost(start: Start) -> None:
    worker = start()
    task = worker.ring()
    worker.reserved()
    hold = claimed(Leg.DECODE).hold
    worker.wait(
        lambda: any(args[2] == (hold,) for name, args in worker.server.called if name == "renew"),
        "it is listed",
    )
    worker.server.gone[hold.nonce] = "expired"
    worker.wait(lambda: task.ends == ["failed: expired"], "its task ends")
    assert worker.heard(Drop) == 1


def test_a_worker_with_nothing_to_claim_gives_the_credit_up(start: Start) -> None:
    worker = start()
    worker.wait(lambda: worker.control.spare == 4, "it wants credits")
    task = Task("req_9")
    worker.control.put(Doorbell("req_9", Leg.DECODE, task))
    worker.wait(lambda: task.ends == ["ok: nothing to claim"], "its task ends")


def test_terminate_cancels_the_request_of_a_leg_and_of_a_credit(start: Start) -> None:
    worker = start()
    task = worker.ring()
    worker.reserved()
    worker.control.put(Abort(task))
    worker.wait(lambda: ("cancel", ("req_1",)) in worker.server.called, "the leg's request is cancelled")

    worker.engine.headroom = HEADROOM._replace(free_tokens=0, admitted=1)
    waits = Task("req_2")
    worker.control.put(Doorbell("req_2", Leg.DECODE, waits))
    worker.control.put(Abort(waits))
    worker.wait(lambda: ("cancel", ("req_2",)) in worker.server.called, "the credit's request is cancelled")
    worker.control.put(Abort(Task("nobody")))


def test_a_crash_of_another_thread_and_of_this_one_end_the_process(start: Start) -> None:
    worker = start()
    worker.control.put(Crashed(RuntimeError("engine")))
    worker.wait(lambda: [str(error) for error in worker.crashes] == ["engine"], "the crash is told")
    other = start()
    other.control.put(cast(Any, Ready("req_1", 1)))  # of no leg: ignored
    other.control.put(cast(Any, "nonsense"))
    other.wait(lambda: other.crashes, "an unknown message is a bug")


def test_a_drain_without_legs_is_over_at_once(start: Start) -> None:
    worker = start()
    assert not worker.control.idle
    worker.control.put(Order.DRAIN)
    worker.wait(lambda: worker.control.idle, "it is idle")
    late = Task("req_2")
    worker.control.put(Doorbell("req_2", Leg.DECODE, late))
    worker.wait(lambda: late.ends == ["ok: handed back"], "a late doorbell goes on")
    assert worker.rung == [Ring(Leg.DECODE, "req_2")]
    assert worker.control.spare == 0


def test_a_drain_waits_for_its_legs_and_hands_back_when_told(start: Start) -> None:
    worker = start(grace_s=600)
    task = worker.ring()
    worker.reserved()
    worker.control.put(Order.DRAIN)
    worker.ring(2)
    worker.wait(lambda: worker.rung, "nothing more is claimed")
    assert not worker.control.idle
    worker.control.put(Order.HAND_BACK)
    worker.wait(lambda: worker.control.idle, "everything is handed back")
    assert task.ends == ["ok: drain"]
    assert worker.server.names().count("release") == 1


def test_the_grace_period_hands_back(start: Start) -> None:
    worker = start(grace_s=0)
    task = worker.ring()
    worker.reserved()
    worker.control.put(Order.DRAIN)
    worker.wait(lambda: worker.control.idle, "it is idle")
    assert task.ends == ["ok: drain"]


def test_a_drain_ends_also_while_redis_is_away(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "HAND_BACK_S", 0.2)
    worker = start(grace_s=0)
    task = worker.ring()
    worker.reserved()
    worker.server.away = True
    worker.control.put(Order.DRAIN)
    worker.wait(lambda: worker.control.idle, "it does not wait for ever")
    assert task.ends == []


def test_pages_that_nothing_proves_restart_the_worker_once(start: Start) -> None:
    worker = start(quarantine_age_s=1)
    leg = claimed(Leg.DECODE)
    worker.ring()
    worker.reserved()
    worker.control.put(reserved(leg))
    worker.wait(lambda: "publish" in worker.server.names(), "its pages are published")
    worker.control.put(Ended("req_1", leg.room, Leg.DECODE, "expired", leg.hold.nonce))
    worker.wait(lambda: worker.full == 1, "it asks for its restart")
    worker.wait(lambda: worker.server.names().count("ask") >= 2, "it goes on asking")
    assert worker.full == 1


def test_who_may_still_write_is_asked_again_between_renewals(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start()
    leg = claimed(Leg.DECODE)
    worker.ring()
    worker.reserved()
    worker.control.put(reserved(leg))
    worker.wait(lambda: "publish" in worker.server.names(), "its pages are published")
    monkeypatch.setattr(leases, "RENEW_EVERY_S", 10 * DEADLINE_S)
    renewals = worker.server.names().count("renew")
    worker.wait(lambda: worker.server.names().count("renew") > renewals, "the last renewal for long")
    worker.control.put(Ended("req_1", leg.room, Leg.DECODE, "expired", leg.hold.nonce))
    worker.wait(lambda: worker.server.names().count("ask") >= 2, "nothing is open, but it goes on asking")


def test_many_messages_do_not_delay_the_renewal(start: Start) -> None:
    worker = start()
    worker.wait(lambda: "renew" in worker.server.names(), "the first renewal")
    first = worker.server.names().count("renew")
    flood = threading.Event()

    def feed() -> None:
        while not flood.is_set():
            worker.control.put(Ready("req_0", 1))
            time.sleep(0)

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        worker.wait(lambda: worker.server.names().count("renew") > first, "the next renewal")
    finally:
        flood.set()
        feeder.join()
