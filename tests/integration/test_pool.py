"""EnginePool in a real Celery worker, on a real Valkey that the tests kill and start again."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from tests.processes import DEADLINE_S, until
from tests.servers import RedisServer, valkey_binary

ROOT = Path(__file__).parents[2]
QUEUE = "prefill.test-model"


class Worker:
    """A `celery worker` whose pool runs an OrderedHost, and a view of it from outside."""

    def __init__(self, broker: RedisServer, folder: Path, **env: str) -> None:
        self.orders = folder / "orders"
        self.orders.mkdir(exist_ok=True)
        self.log = folder / "worker.log"
        self.app = Celery(broker=broker.url)
        self.app.conf.task_send_sent_event = False
        self.events: list[dict[str, Any]] = []
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "celery", "-q", "-A", "workers.app", "worker", "-P", "custom"),
                *("-Q", QUEUE, "-n", "prefill@test", "-E", "--without-gossip", "--without-mingle"),
            ],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "REDIS_URL": broker.url,
                "CELERY_CUSTOM_WORKER_POOL": "tests.integration.ordered_host:OrderedPool",
                "ORDERS": str(self.orders),
                **env,
            },
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
        )

    def ready(self) -> "Worker":
        threading.Thread(target=self.watch, daemon=True).start()
        self.sees_events()
        return self

    def sees_events(self) -> None:
        """Wait for the next heartbeat: the test is subscribed, and the worker publishes."""
        seen = len(self.events)
        until(lambda: len(self.events) > seen, "an event arrives")

    def watch(self) -> None:
        """Collect this worker's Celery events, over reconnects."""
        while self.process.poll() is None:
            with contextlib.suppress(Exception), self.app.connection_for_read() as connection:
                self.app.events.Receiver(connection, handlers={"*": self.events.append}).capture()

    def ring(self, request_id: str, task: str = "kvrelay.prefill") -> str:
        task_id = f"{request_id}:prefill:{time.monotonic_ns()}"
        self.app.send_task(
            task, args=(request_id,), task_id=task_id, queue=QUEUE, retry_policy={"interval_start": 0.05}
        )
        return task_id

    def order(self, request_id: str, end: str = "ok") -> None:
        (self.orders / f"{request_id}.{end}").touch()

    def calls(self) -> list[str]:
        """What the pool has asked of the host so far."""
        path = self.orders / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def rung(self) -> list[str]:
        return [call.split()[1] for call in self.calls() if call.startswith("ring ")]

    def hears(self, request_id: str) -> None:
        until(lambda: request_id in self.rung(), f"the bell of {request_id} arrives")

    def obeys(self, request_id: str) -> None:
        """Its order is followed: the task ends."""
        until(lambda: not (self.orders / f"{request_id}.ok").exists(), f"the task of {request_id} ends")

    def reaches(self, task_id: str, state: str) -> None:
        until(lambda: self.states(task_id)[-1:] == [state], f"{task_id} has {state}")

    def states(self, task_id: str) -> list[str]:
        """The Celery events of one task, in order, without their prefix."""
        seen = [event for event in self.events if event.get("uuid") == task_id]
        return [event["type"].removeprefix("task-") for event in sorted(seen, key=lambda e: e["clock"])]

    def inspect(self, what: str) -> Any:
        """The worker's answer to one remote-control command, asked again until it comes."""

        def ask() -> Any:
            with contextlib.suppress(OSError, RedisError, OperationalError):
                return getattr(self.app.control.inspect(timeout=0.5), what)()

        return until(ask, f"the worker answers {what}")["prefill@test"]

    def waiting(self) -> int:
        with self.app.connection_for_read() as connection:
            return int(connection.default_channel.client.llen(QUEUE))

    def ended(self) -> int:
        return self.process.wait(timeout=DEADLINE_S)


Start = Callable[..., Worker]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(valkey_binary(), tmp_path / "valkey", append_fsync="always") as server:
        yield server


@pytest.fixture
def start(broker: RedisServer, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def start(**env: str) -> Worker:
        workers.append(Worker(broker, tmp_path, **env))
        return workers[-1]

    yield start
    for worker in workers:
        worker.process.kill()
        worker.process.wait()
        print(worker.log.read_text())


def test_a_task_is_started_until_the_host_ends_it(start: Start) -> None:
    worker = start().ready()
    good, bad = worker.ring("req_good"), worker.ring("req_bad")
    until(lambda: {"req_good", "req_bad"} <= set(worker.rung()), "both bells rang")

    active = worker.inspect("active")
    assert {(task["name"], *task["args"]) for task in active} == {
        ("kvrelay.prefill", "req_good"),
        ("kvrelay.prefill", "req_bad"),
    }
    assert all(task["acknowledged"] for task in active)

    worker.order("req_good")
    worker.order("req_bad", "failed")
    until(lambda: worker.inspect("active") == [], "nothing is active")
    until(lambda: worker.states(good)[-1:] == ["succeeded"], "the good task succeeded")
    until(lambda: worker.states(bad)[-1:] == ["failed"], "the bad task failed")
    assert worker.states(good) == ["received", "started", "succeeded"]
    (failure,) = [e for e in worker.events if e.get("uuid") == bad and e["type"] == "task-failed"]
    assert failure["exception"] == "req_bad went wrong"


def test_what_does_not_fit_stays_in_the_broker(start: Start) -> None:
    worker = start(ORDERS_CAPACITY="2").ready()
    for i in range(5):
        worker.ring(f"req_{i}")
    until(lambda: len(worker.rung()) == 2 and worker.waiting() == 3, "two run and three wait")
    assert worker.inspect("stats")["pool"]["max-concurrency"] == 2

    worker.order(worker.rung()[0])
    until(lambda: len(worker.rung()) == 3, "an end makes room for one more")
    assert worker.waiting() == 2


def test_stats_show_the_engine(start: Start) -> None:
    worker = start().ready()
    pool = worker.inspect("stats")["pool"]
    assert (pool["free_pages"], pool["running"]) == (7, 0)
    assert pool["implementation"].endswith(":OrderedPool")


def test_terminate_aborts_one_request(start: Start) -> None:
    worker = start().ready()
    doomed, other = worker.ring("req_doomed"), worker.ring("req_other")
    until(lambda: len(worker.rung()) == 2, "both run")

    worker.app.control.revoke(doomed, terminate=True)
    until(lambda: "abort req_doomed" in worker.calls(), "the host aborts")
    until(lambda: worker.states(doomed)[-1:] == ["revoked"], "the task is revoked")
    assert [task["id"] for task in worker.inspect("active")] == [other]
    worker.order("req_other")
    until(lambda: worker.states(other)[-1:] == ["succeeded"], "the other goes on")
    assert "succeeded" not in worker.states(doomed)


def test_a_fork_is_a_task_like_any_other(start: Start) -> None:
    """No message crosses the broker for it, but Celery and Flower see it come, run and end."""
    worker = start().ready()
    leader = worker.ring("req_1")
    until(lambda: worker.rung() == ["req_1"], "the leader runs")
    worker.order("req_1.req_2", "fork")
    worker.order("req_1.req_3", "fork")
    until(lambda: len(worker.inspect("active")) == 3, "all are active")
    forks = {task["args"][0]: task["id"] for task in worker.inspect("active")}
    assert worker.rung() == ["req_1"], "they are no doorbells"
    assert worker.inspect("stats")["pool"]["tasks"] == 3

    worker.order("req_1")
    until(lambda: worker.states(leader)[-1:] == ["succeeded"], "the leader ends first")
    worker.order("req_2")
    until(lambda: worker.states(forks["req_2"]) == ["received", "started", "succeeded"], "a fork succeeds")
    (received,) = [
        e for e in worker.events if e.get("uuid") == forks["req_2"] and e["type"] == "task-received"
    ]
    assert (received["name"], received["args"], received["parent_id"]) == (
        "kvrelay.prefill",
        "('req_2',)",
        leader,
    )

    worker.app.control.revoke(forks["req_3"], terminate=True)
    until(lambda: "abort req_3" in worker.calls(), "Terminate reaches a fork")
    until(lambda: worker.states(forks["req_3"])[-1:] == ["revoked"], "the fork is revoked")
    until(lambda: worker.inspect("active") == [], "nothing is active")


def test_a_fork_of_an_outage_is_told_afterwards(broker: RedisServer, start: Start) -> None:
    worker = start().ready()
    worker.ring("req_1")
    until(lambda: worker.rung() == ["req_1"], "the leader runs")
    broker.kill()
    worker.order("req_1.req_2", "fork")
    until(lambda: not (worker.orders / "req_1.req_2.fork").exists(), "a fork begins during the outage")
    broker.start()
    until(lambda: len(worker.inspect("active")) == 2, "it is active")
    worker.order("req_2")
    until(lambda: len(worker.inspect("active")) == 1, "it has ended")


def test_bad_doorbells_fail_and_the_worker_lives(start: Start) -> None:
    worker = start().ready()
    bells = [
        worker.ring("req_boom"),
        worker.ring("req_1", task="celery.accumulate"),
        worker.app.send_task("kvrelay.prefill", args=(1, 2), queue=QUEUE).id,
    ]
    for bell in bells:
        worker.reaches(bell, "failed")
    worker.order("req_fine")
    worker.reaches(worker.ring("req_fine"), "succeeded")


def test_sigterm_finishes_what_runs(start: Start) -> None:
    worker = start().ready()
    running = worker.ring("req_1")
    until(lambda: worker.rung() == ["req_1"], "it runs")

    worker.process.send_signal(signal.SIGTERM)
    until(lambda: "drain" in worker.calls(), "the host drains")
    worker.ring("req_late")
    worker.order("req_1")
    assert worker.ended() == 0
    assert worker.calls()[1:] == ["ring req_1 prefill", "drain", "stop"]
    until(lambda: worker.states(running)[-1:] == ["succeeded"], "its end was sent before the exit")
    assert worker.waiting() == 1


def test_the_grace_period_ends_a_drain(start: Start) -> None:
    worker = start(ORDERS_GRACE_S="0.2").ready()
    worker.ring("req_1")
    until(lambda: worker.rung(), "it runs")
    worker.process.send_signal(signal.SIGTERM)
    assert worker.ended() == 0
    assert worker.calls()[-3:] == ["drain", "hand_back req_1", "stop"]


@pytest.mark.parametrize(
    "signals", [(signal.SIGQUIT,), (signal.SIGTERM, signal.SIGTERM), (signal.SIGTERM, signal.SIGQUIT)]
)
def test_a_cold_shutdown_hands_back(start: Start, signals: tuple[signal.Signals, ...]) -> None:
    worker = start().ready()
    worker.ring("req_1")
    worker.ring("req_2")
    until(lambda: len(worker.rung()) == 2, "both run")
    for each in signals:
        worker.process.send_signal(each)
        until(lambda: "drain" in worker.calls(), "the host drains")
    worker.ended()
    assert worker.calls()[-3:] == ["drain", "hand_back req_1 req_2", "stop"]
    assert "abort req_1" not in worker.calls()


def test_a_host_that_cannot_start_ends_the_worker_with_its_message(start: Start, tmp_path: Path) -> None:
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders" / "unusable").touch()
    worker = start()
    assert worker.ended() == os.EX_CONFIG
    assert "the model is unusable: set MODEL to another one" in worker.log.read_text()
    assert "Traceback" not in worker.log.read_text()


def test_an_error_that_celery_cannot_survive_shows_in_the_exit_status(
    broker: RedisServer, start: Start
) -> None:
    """A supervisor that restarts on failure has to see one."""
    worker = start().ready()
    with broker.client() as client:
        client.config_set("min-replicas-to-write", 1)  # from now on the server refuses to pop from a queue
    assert worker.ended() == 1
    assert worker.calls()[-1] == "stop"


def test_work_in_flight_survives_three_restarts_of_redis(broker: RedisServer, start: Start) -> None:
    worker = start().ready()
    tasks = [worker.ring("req_long")]
    until(lambda: worker.rung() == ["req_long"], "it runs")
    for i in range(3):
        tasks.append(worker.ring(f"req_{i}"))
        worker.hears(f"req_{i}")
        broker.kill()
        worker.order(f"req_{i}")
        worker.obeys(f"req_{i}")
        broker.start()
        tasks.append(worker.ring(f"req_after_{i}"))
        worker.hears(f"req_after_{i}")
        assert worker.process.poll() is None
        worker.order(f"req_after_{i}")
    until(lambda: len(worker.inspect("active")) == 1, "all but one ended")
    worker.sees_events()
    worker.order("req_long")
    until(lambda: worker.inspect("active") == [], "all ended")
    assert len(worker.rung()) == len(set(worker.rung())) == 7
    assert worker.states(tasks[0])[-1:] == ["succeeded"]
    worker.process.send_signal(signal.SIGTERM)
    assert worker.ended() == 0
