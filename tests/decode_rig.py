"""The legs of a decode worker around which a test says what threads, peers and server do."""

from collections.abc import Callable, Sequence
from typing import Any, cast

from prometheus_client import CollectorRegistry

from relay.mailbox import Ended, Ready
from relay.request import Claimed, Leg, Why
from relay.settings import Settings
from tests.desk import Receiver, RecordingDesk, Task, claimed
from workers.decode import DecodeLegs
from workers.engine.messages import (
    Drop,
    Failed,
    Reserved,
    Retracted,
    Sampled,
)
from workers.meters import Meters
from workers.output import Close, Closed, Message, Open, OutputThread
from workers.transfer.base import Seal, seal_nonce

PAGES = (3, 4)
FIRST = Sampled(42)
PHASES = ["reserving", "publishing", "published", "running", "closing"]


def reserved(leg: Claimed, pages: Sequence[int] = PAGES, first_page: int = 0) -> Reserved:
    return Reserved(leg.hold.nonce, tuple(pages), first_page, len(leg.tokens))


class Output:
    """Stands where the output thread is; the tests answer for it."""

    def __init__(self) -> None:
        self.got: list[Message] = []

    def put(self, message: Message) -> None:
        self.got.append(message)

    def count(self, kind: type[Open] | type[Close], key: str) -> int:
        return sum(isinstance(message, kind) and message.key == key for message in self.got)


class Worker:
    """The legs of a decode worker, with what the threads and peers around them would do."""

    def __init__(self, kind: type[DecodeLegs] = DecodeLegs, **settings: Any) -> None:
        self.desk = RecordingDesk(**settings)
        self.server = self.desk.server
        self.manager = self.desk.kv
        self.output = Output()
        self.counted = CollectorRegistry()
        meters = Meters(Settings(role="decode"), self.counted)
        self.legs = kind(self.desk, cast(OutputThread, self.output), meters)

    def start(self, number: int = 1, **more: Any) -> tuple[Claimed, Task]:
        leg = claimed(self.legs.takes, number, **more)
        task = Task(leg.hold.request_id)
        self.legs.start(leg, task)
        return leg, task

    def reserve(self, leg: Claimed) -> None:
        self.legs.on_engine(reserved(leg))

    def publish(self, leg: Claimed) -> None:
        self.reserve(leg)
        self.desk.flush()

    def write(self, leg: Claimed, **other: Any) -> None:
        """The prefill worker writes the seal."""
        right = Seal(
            leg.room, leg.attempt, seal_nonce(leg.hold.nonce), len(leg.emitted), len(leg.tokens), 2, FIRST, 0
        )
        self.receiver(leg).written = right._replace(**other)

    def ready(self, leg: Claimed) -> None:
        self.legs.on_mail(Ready(leg.hold.request_id, leg.room))

    def run(self, leg: Claimed) -> None:
        self.write(leg)
        self.ready(leg)

    def retract(self, leg: Claimed) -> None:
        self.legs.on_engine(Retracted(leg.hold.nonce))

    def receiver(self, leg: Claimed) -> Receiver:
        return self.manager.receivers[leg.room]

    def flush(self) -> None:
        self.desk.flush()

    def reach(self, phase: str, **more: Any) -> tuple[Claimed, Task]:
        leg, task = self.start(**more)
        steps: dict[str, list[Callable[[Claimed], None]]] = {
            "reserving": [],
            "publishing": [self.reserve],  # the call waits
            "published": [self.publish],
            "running": [self.publish, self.run],
            "closing": [self.publish, self.run, self.retract],
        }
        for step in steps[phase]:
            step(leg)
        return leg, task

    def assert_gone(self, leg: Claimed, quarantined: bool = False) -> None:
        key = leg.hold.nonce
        assert self.desk.dropped[key] >= 1
        drops = [each for each in self.desk.told if isinstance(each, Drop) and each.key == key]
        assert any(drop.quarantine == leg.room for drop in drops) is quarantined
        assert self.legs.settled()
        assert self.legs.holds() == []
        assert bool(self.manager.quarantined) is quarantined
        assert len(self.manager.free_rows) == 4 - quarantined


def lost_by_mail(worker: Worker, leg: Claimed) -> None:
    worker.legs.on_mail(Ended("req_1", leg.room, Leg.DECODE, "cancelled", leg.hold.nonce))


def lost_by_renewal(worker: Worker, leg: Claimed) -> None:
    worker.legs.on_lost(leg.hold, "cancelled")


def handed_back(worker: Worker, leg: Claimed) -> None:
    running = worker.output.count(Open, leg.hold.nonce) == 1
    worker.legs.hand_back()
    if running:  # what it produced is emitted before it goes
        assert worker.output.count(Close, leg.hold.nonce) == 1
        worker.legs.on_outcome(Closed(leg.hold.nonce))
    worker.flush()
    assert worker.server.args("release")[1] in {Why.DRAIN, Why.RETRACT}


def engine_failed(worker: Worker, leg: Claimed) -> None:
    worker.legs.on_engine(Failed(leg.hold.nonce, "NaN"))
    worker.flush()
    assert worker.server.args("fail") == (leg.hold, "engine_failed", "NaN")


ENDS: dict[Callable[[Worker, Claimed], None], bool] = {
    lost_by_mail: True,
    lost_by_renewal: True,
    handed_back: True,
    engine_failed: False,
}
