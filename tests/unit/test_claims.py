"""Credits become legs: held, trimmed, given back; never lost and never ended twice."""

import time

import pytest
from redis.exceptions import ConnectionError, ResponseError

from relay.answers import Claim, Left, Waiting
from relay.request import Claimed, Hold, Leg, Ring, Why
from tests.desk import RecordingDesk, Task, claimed
from workers import calls
from workers.budget import Budget
from workers.claims import SPARE_CREDITS, Claims
from workers.doorbell import Doorbell, TaskHandle
from workers.engine.messages import Headroom, LegEvent
from workers.legs import Legs

ROOMY = Headroom(1600, 1600, 0, 0, 100, 0, 0, 0, 100, admitted=0)


@pytest.fixture(autouse=True)
def _retry_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "RETRY_S", 0.0)


class NoLegs(Legs):
    """Only remembers what starts."""

    takes = Leg.PREFILL

    def __init__(self) -> None:
        self.started: list[tuple[Claimed, TaskHandle]] = []
        self.is_full = False
        self.rooms_made = 0

    def start(self, claimed: Claimed, task: TaskHandle) -> None:
        self.started.append((claimed, task))

    def on_engine(self, event: LegEvent) -> None: ...

    def on_lost(self, hold: Hold, why: str) -> None: ...

    def holds(self) -> list[Hold]:
        return []

    def request_of(self, task: TaskHandle) -> str | None:
        return None

    def hand_back(self) -> None: ...

    def settled(self) -> bool:
        return True

    def full(self) -> bool:
        return self.is_full

    def make_room(self) -> None:
        self.rooms_made += 1


class Worker:
    def __init__(self, **settings: int) -> None:
        self.desk = RecordingDesk(**settings)
        self.server = self.desk.server
        self.legs = NoLegs()
        self.headroom = ROOMY
        self.claims = Claims(self.desk, self.legs, Budget(lambda: self.headroom))
        self.now = 1e9  # far after every retry

    def ring(self, number: int = 1) -> Task:
        task = Task(f"req_{number}")
        self.claims.add(Doorbell(task.request_id, Leg.PREFILL, task))
        return task

    def step(self) -> None:
        self.now += 1.0
        self.claims.step(self.now)
        self.desk.flush()

    def grant(self, number: int = 1) -> Claimed:
        leg = claimed(Leg.PREFILL, number)
        self.server.replies["claim"] = Claim(leg, [])
        return leg

    def claimed(self) -> int:
        return self.server.names().count("claim")


def test_a_credit_becomes_a_leg() -> None:
    worker = Worker()
    task = worker.ring()
    leg = worker.grant()
    worker.step()
    takes, boot, nonce, room, free, capacity, lease_ms, wanted, wait_ms = worker.server.args("claim")
    assert (takes, boot, free, capacity, lease_ms, wanted) == (Leg.PREFILL, "here", 1600, 1600, 3000, "req_1")
    assert wait_ms == 0, "there is nobody else"
    assert len(bytes.fromhex(nonce)) == 16
    assert 0 < room < 1 << 63
    assert worker.legs.started == [(leg, task)]
    assert (len(worker.claims), task.ends) == (0, [])


def test_several_credits_claim_one_after_the_other() -> None:
    worker = Worker()
    for number in range(3):
        worker.ring(number)
    worker.grant()
    worker.step()
    assert len(worker.legs.started) == 3
    claims = [args for name, args in worker.server.called if name == "claim"]
    assert len({args[2] for args in claims}) == len({args[3] for args in claims}) == 3


def test_a_credit_without_room_is_held() -> None:
    worker = Worker()
    worker.ring()
    worker.headroom = ROOMY._replace(free_tokens=0)
    worker.step()
    worker.headroom, worker.legs.is_full = ROOMY, True
    worker.step()
    assert (worker.claimed(), len(worker.claims)) == (0, 1)
    worker.legs.is_full = False
    worker.grant()
    worker.step()
    assert len(worker.legs.started) == 1


def test_credits_beyond_what_waits_are_given_up() -> None:
    worker = Worker()
    tasks = [worker.ring(number) for number in range(3)]
    worker.server.replies["waiting"] = Waiting(1, retracted=False)
    worker.step()
    assert [task.ends for task in tasks] == [["ok: nothing to claim"]] * 2 + [[]]
    assert len(worker.claims) == 1
    assert worker.legs.rooms_made == 0


def test_a_retracted_leg_that_does_not_fit_asks_for_room() -> None:
    worker = Worker()
    task = worker.ring()
    worker.server.replies["waiting"] = Waiting(1, retracted=True)
    worker.step()
    assert worker.legs.rooms_made == 1
    assert task.ends == []


def test_a_refused_call_does_not_stop_claiming() -> None:
    worker = Worker()
    task = worker.ring()
    worker.server.replies |= {"claim": ResponseError("wrong type"), "waiting": ResponseError("wrong type")}
    worker.step()
    assert len(worker.claims) == 1
    worker.grant()
    worker.step()
    assert [started for _, started in worker.legs.started] == [task]


def test_a_claim_whose_reply_is_lost_is_repeated_by_the_same_nonce() -> None:
    worker = Worker()
    worker.ring()
    worker.grant()
    worker.server.lose_reply = True
    worker.step()
    assert worker.claims.spare(active=1) == 0
    worker.step()
    first, second = (args for name, args in worker.server.called if name == "claim")
    assert first == second
    assert len(worker.legs.started) == 1


def test_a_trim_of_before_an_outage_does_not_end_a_credit_that_claims_now() -> None:
    worker = Worker()
    task = worker.ring()
    worker.server.replies["waiting"] = ConnectionError("connection reset")
    worker.step()
    assert (worker.claimed(), len(worker.claims)) == (1, 1)
    worker.server.replies["waiting"] = Waiting(0, retracted=False)
    worker.grant()
    worker.step()
    assert [started for _, started in worker.legs.started] == [task]
    assert task.ends == []


def test_closing_hands_the_credits_back_and_takes_no_more() -> None:
    worker = Worker()
    task = worker.ring(1)
    worker.claims.close()
    late = worker.ring(2)
    worker.step()
    assert worker.claimed() == 0
    assert worker.desk.rung == [Ring(Leg.PREFILL, "req_1"), Ring(Leg.PREFILL, "req_2")]
    assert task.ends == late.ends == ["ok: handed back"]
    assert worker.claims.spare(active=0) == 0


@pytest.mark.parametrize("granted", [True, False])
def test_a_claim_that_is_on_its_way_while_the_worker_drains_is_given_back(granted: bool) -> None:
    worker = Worker()
    task = worker.ring()
    worker.server.away = True
    worker.step()
    worker.claims.close()
    assert task.ends == []
    worker.server.away = False
    if granted:
        leg = worker.grant()
    worker.step()
    assert worker.legs.started == []
    assert task.ends == ["ok: handed back"]
    assert len(worker.claims) == 0
    if granted:
        assert worker.server.args("release") == (leg.hold, Why.DRAIN)
    else:
        assert worker.desk.rung == [Ring(Leg.PREFILL, "req_1")]


def test_a_task_names_its_request_also_while_it_claims() -> None:
    worker = Worker()
    first, second = worker.ring(1), worker.ring(2)
    worker.server.away = True
    worker.step()
    assert worker.claims.request_of(first) == "req_1"
    assert worker.claims.request_of(second) == "req_2"
    assert worker.claims.request_of(Task("req_1")) is None


@pytest.mark.parametrize(
    ("active", "free_tokens", "full", "spare"),
    [
        (0, 1600, False, SPARE_CREDITS),
        (62, 1600, False, 2),
        (64, 1600, False, 0),
        (65, 1600, False, 0),
        (0, 15, False, 0),  # less than a page
        (0, 1600, True, 0),
    ],
)
def test_how_many_more_credits_are_of_use(active: int, free_tokens: int, full: bool, spare: int) -> None:
    worker = Worker()
    worker.headroom = ROOMY._replace(free_tokens=free_tokens)
    worker.legs.is_full = full
    assert worker.claims.spare(active) == spare


def test_a_held_credit_takes_no_others_in() -> None:
    worker = Worker()
    worker.ring()
    assert worker.claims.spare(active=1) == 0


@pytest.mark.parametrize(
    ("takes", "others", "wait_ms"),
    [
        (Leg.PREFILL, ["decode-1"], 0),
        (Leg.PREFILL, ["decode-1", "prefill-1"], 50),
        (Leg.PREFILL, ["unified-1"], 50),
        (Leg.BOTH, ["prefill-1"], 50),
        (Leg.DECODE, ["decode-1", "prefill-1"], 0),
    ],
)
def test_others_are_given_time_where_there_are_such(takes: Leg, others: list[str], wait_ms: int) -> None:
    worker = Worker()
    worker.legs.takes = takes
    worker.claims.meet(["here", *others])
    worker.ring()
    worker.step()
    assert worker.server.args("claim")[-1] == wait_ms
    worker.claims.meet(["here"])
    worker.step()
    assert worker.server.args("claim")[-1] == 0


def test_a_credit_whose_leg_is_left_to_another_is_kept_until_then() -> None:
    worker = Worker()
    task = worker.ring()
    worker.server.replies["claim"] = Left(5_000)
    worker.step()
    assert "waiting" not in worker.server.names()
    assert (len(worker.claims), task.ends) == (1, [])
    assert 4 < worker.claims.retry_s(time.monotonic()) <= 5
    assert worker.claims.spare(active=1) == SPARE_CREDITS - 1, "it is free for other legs"
    leg = worker.grant()
    worker.step()
    assert worker.legs.started == [(leg, task)]


def test_a_credit_whose_leg_is_left_goes_to_others_when_the_worker_drains() -> None:
    worker = Worker()
    task = worker.ring()
    worker.server.away = True
    worker.step()
    worker.claims.close()
    worker.server.away = False
    worker.server.replies["claim"] = Left(5_000)
    worker.step()
    assert task.ends == ["ok: handed back"]
    assert worker.desk.rung == [Ring(Leg.PREFILL, "req_1")]


def test_what_is_offered_is_a_credit_of_its_own() -> None:
    worker = Worker()
    worker.claims.offered("req_0")
    assert len(worker.claims) == 0, "nothing of this worker can have been known"
    before = worker.ring(1)
    worker.grant(1)
    worker.step()
    worker.claims.offered("req_2")
    (task,) = before.beside
    assert task.request_id == "req_2"
    leg = worker.grant(2)
    worker.step()
    assert worker.server.args("claim")[7] == "req_2"
    assert worker.legs.started[1:] == [(leg, task)]
    worker.claims.close()
    worker.claims.offered("req_3")
    assert len(worker.claims) == len(before.beside) - 1 == 0


def test_by_a_setting_nobody_is_given_time() -> None:
    worker = Worker(prefix_wait_ms=0)
    worker.claims.meet(["here", "prefill-1"])
    worker.ring()
    worker.step()
    assert worker.server.args("claim")[-1] == 0
