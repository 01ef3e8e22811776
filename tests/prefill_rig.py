"""The legs of a prefill worker around which a test says what threads and server do."""

from collections.abc import Callable
from typing import Any

from relay.mailbox import Ended, Published
from relay.request import Claimed, Leg, Why
from relay.stretches import Stretch
from tests.desk import RecordingDesk, Sender, Task, claimed
from workers.engine.messages import Admitted, Failed, Prefilled, Sampled
from workers.prefill import PrefillLegs
from workers.senders import Senders
from workers.transfer.base import Sent, Settled

PAGES = (3, 4)
THERE = (7, 8)
D_NONCE = "d" * 32
FIRST = Sampled(42)
PHASES = ["started", "admitted", "mailed", "bootstrapped", "computed", "sealed"]


class Worker:
    """The legs of a prefill worker, with what the threads around them would do."""

    def __init__(self, **settings: Any) -> None:
        self.desk = RecordingDesk(**settings)
        self.server = self.desk.server
        self.senders = Senders(self.desk.manager, layers=1, page_size=16)
        self.legs = PrefillLegs(self.desk, self.senders)

    def start(self, number: int = 1, **more: Any) -> tuple[Claimed, Task]:
        leg = claimed(Leg.PREFILL, number, **more)
        task = Task(leg.hold.request_id)
        self.legs.start(leg, task)
        return leg, task

    def admit(self, leg: Claimed, cached_tokens: int = 0) -> None:
        event = Admitted(leg.hold.nonce, PAGES, cached_tokens)
        self.senders.admitted(event)  # on the engine thread
        self.legs.on_engine(event)

    def compute(self, leg: Claimed) -> None:
        self.legs.on_engine(Prefilled(leg.hold.nonce, FIRST, (Stretch(1.0, 2.0, 20),)))

    def mail(self, leg: Claimed, boot: str = "D") -> None:
        self.legs.on_mail(Published(leg.hold.request_id, leg.room, boot, D_NONCE, THERE, 5))

    def sent(self, leg: Claimed) -> None:
        self.legs.on_transfer(Sent(leg.room, 4096, 2, 300))

    def settle(self, leg: Claimed) -> None:
        self.legs.on_transfer(Settled(leg.room))

    def sender(self, leg: Claimed) -> Sender:
        return self.desk.kv.senders[leg.room]

    def flush(self) -> None:
        self.desk.flush()

    def reach(self, phase: str, **more: Any) -> tuple[Claimed, Task]:
        leg, task = self.start(**more)
        steps: dict[str, list[Callable[[Claimed], None]]] = {
            "started": [],
            "admitted": [self.admit],
            "mailed": [self.mail],
            "bootstrapped": [self.admit, self.mail],
            "computed": [self.admit, self.compute],
            "sealed": [self.admit, self.mail, self.compute],
            "sent": [self.admit, self.mail, self.compute, self.sent],
        }
        for step in steps[phase]:
            step(leg)
        return leg, task

    def assert_gone(self, leg: Claimed) -> None:
        assert self.desk.dropped[leg.hold.nonce] == 1
        assert self.legs.settled()
        assert self.legs.holds() == []
        assert (self.senders._rooms, self.senders._open) == ({}, {})
        assert not self.legs.unproven()


def lost_by_mail(worker: Worker, leg: Claimed) -> None:
    worker.legs.on_mail(Ended("req_1", leg.room, Leg.PREFILL, "cancelled", leg.hold.nonce))


def lost_by_renewal(worker: Worker, leg: Claimed) -> None:
    worker.legs.on_lost(leg.hold, "cancelled")


def handed_back(worker: Worker, _: Claimed) -> None:
    worker.legs.hand_back()
    worker.flush()
    assert worker.server.args("release")[1] is Why.DRAIN


def engine_failed(worker: Worker, leg: Claimed) -> None:
    worker.legs.on_engine(Failed(leg.hold.nonce, "NaN"))
    worker.flush()
    assert worker.server.args("fail") == (leg.hold, "engine_failed", "NaN")


def too_late(worker: Worker, leg: Claimed) -> None:
    worker.legs.on_engine(Failed(leg.hold.nonce, "Too late.", "timeout"))
    worker.flush()
    assert worker.server.args("fail") == (leg.hold, "timeout", "Too late.")


ENDS: dict[Callable[[Worker, Claimed], None], bool] = {
    lost_by_mail: True,
    lost_by_renewal: True,
    handed_back: True,
    engine_failed: False,
    too_late: False,
}
