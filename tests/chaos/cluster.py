"""A whole relay on this machine: Valkey, prefill and decode workers, and what may happen to them."""

import os
import secrets
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

from celery import Celery
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from app.launch.programs import worker_command, worker_env
from app.launch.supervisor import die_with_parent
from relay.celery import FLUSH_CACHE
from relay.request import Ring, Submission, member_id
from relay.rooms import Rooms
from relay.routing import queue_of
from relay.sampling import SamplingParams
from relay.settings import Settings
from relay.worker_card import WorkerCard
from tests.chaos.faults import Fault, Kind
from tests.integration.until import until
from tests.servers import RedisServer, valkey_binary

ROOT = Path(__file__).parents[2]
START_S = 90.0
KEEP_EVERY_S = 0.05
TIMEOUT_MS = 120_000
SMALL = {
    "DTYPE": "float32",
    "THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "KV_POOL_TOKENS": "8192",
    "KV_DIGEST": "1",
    "CHUNK_TOKENS": "256",  # no prompt here is longer, and a worker that starts computes one of that length
    "SUSPECT_AFTER": "100",  # kills here come from outside: no request is to blame
    "GRACE_S": "1",
}


class Wave(NamedTuple):
    number: int
    faults: dict[int, Fault]

    @property
    def name(self) -> str:
        return f"{self.number:06}"


class Happened(NamedTuple):
    fault: Fault
    pid: int
    boot: str  # "" when the worker was not registered
    at: float  # seconds since the epoch


class WorkerProcess:
    """One place in a pool; a process that dies may be followed by another one."""

    def __init__(self, role: str, number: int, folder: Path, env: dict[str, str], model: str) -> None:
        self.name = f"{role}-{number}"
        self.role = role
        self.log = folder / f"{self.name}.log"
        self._command = worker_command(role, model, self.name)
        self._env = {**os.environ, **worker_env(role), **env}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert not self.alive
        parent = os.getpid()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=self._env,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: die_with_parent(parent),
            )

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def send(self, number: signal.Signals) -> None:
        if self.alive:
            os.kill(self.pid, number)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class Cluster:
    """While `restarts` is set, a worker that died is started again at once, as a supervisor does."""

    def __init__(
        self, folder: Path, prefill: int = 2, decode: int = 2, fsync: str = "everysec", **env: str
    ) -> None:
        self.folder = folder
        self.faults = folder / "faults"
        self.faults.mkdir(parents=True)
        self.server = RedisServer(valkey_binary(), folder / "valkey", append_fsync=fsync)
        self.broker_url = self.server.url.removesuffix("/0") + "/1"
        self._env = {
            **SMALL,
            **env,
            "PYTHONPATH": str(ROOT),
            "REDIS_URL": self.server.url,
            "BROKER_URL": self.broker_url,
            "FAULTS": str(self.faults),
            "CELERY_CUSTOM_WORKER_POOL": "tests.chaos.pool:FaultyPool",
        }
        self.model = Settings.from_env({}).model_name
        self.rooms = Rooms(self.server.url, self.model)
        self.app = Celery(broker=self.broker_url)
        self.workers: list[WorkerProcess] = []
        self.happened: dict[int, Happened] = {}  # of the last wave, by number of the fault
        self.restarts = True
        self._counts = {"prefill": prefill, "decode": decode}
        self._started: Counter[str] = Counter()
        self._wave: Wave = Wave(0, {})
        self._cards: dict[int, str] = {}  # pid -> boot, of all that were ever seen
        self._thaw: dict[int, float] = {}  # stopped pid -> when to continue it, monotonic
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)

    # ---- life

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.server)
            stack.callback(self.rooms.close)
            stack.callback(self.app.close)
            stack.callback(self._end_workers)
            for role, count in self._counts.items():
                for _ in range(count):
                    self.add(role)
            self.ready()
            self._keeper.start()
            stack.callback(self._keeper.join)
            stack.callback(self._closing.set)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _end_workers(self) -> None:
        for worker in self.workers:
            worker.end()

    def add(self, role: str) -> WorkerProcess:
        self._started[role] += 1
        worker = WorkerProcess(role, self._started[role], self.folder, self._env, self.model)
        self.workers.append(worker)
        worker.start()
        return worker

    def remove(self, worker: WorkerProcess) -> None:
        """Asked to end, as in a roll-out; the caller waits for `worker.process`."""
        self.workers.remove(worker)
        worker.send(signal.SIGTERM)

    def ready(self) -> None:
        """Every worker process is registered."""
        until(lambda: all(self.boot_of(w) for w in self.workers), "all workers are registered", START_S)

    def boot_of(self, worker: WorkerProcess) -> str | None:
        if not worker.alive:
            return None
        for card in self.cards():
            self._cards[card.incarnation.pid] = card.boot
        return self._cards.get(worker.pid)

    def cards(self) -> list[WorkerCard]:
        try:
            return self.rooms.workers()
        except RedisError:
            return []

    # ---- requests

    def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams, rings: int = 1, samples: int = 1
    ) -> list[str]:
        """Samples of one prompt; the first leads."""
        leader = f"req_{secrets.token_hex(8)}"
        group = [
            Submission(
                member_id(leader, index),
                tuple(prompt_ids),
                params.sample(index),
                TIMEOUT_MS,
                leader=leader if index else None,
            )
            for index in range(samples)
        ]
        (bell,) = self.rooms.submit(*group).rings
        for _ in range(rings):
            self.ring(bell)
        return [member.request_id for member in group]

    def ring(self, bell: Ring) -> None:
        self.app.send_task(
            f"kvrelay.{bell.leg}",
            args=(bell.request_id,),
            task_id=f"{bell.request_id}:{bell.leg}:{secrets.token_hex(4)}",
            queue=queue_of(bell.leg, self.model),
        )

    def forget(self) -> None:
        """Decode workers keep no prefix, so that all KV travels again. The broker may have been away."""
        until(self._forgot, "decode workers forget their prefixes", START_S)

    def _forgot(self) -> bool:
        names = [card.name for card in self.cards() if card.role == "decode"]
        try:
            replies = self.app.control.broadcast(
                FLUSH_CACHE, destination=names, reply=True, limit=len(names), timeout=2
            )
        except (RedisError, OperationalError):
            return False
        return 0 < len(names) <= len(replies)

    # ---- faults

    def arm(self, faults: Sequence[Fault]) -> None:
        """These may happen from now on, and no others."""
        self._wave = Wave(self._wave.number + 1, {fault.number: fault for fault in faults})
        self.happened = {}
        hidden = self.faults / "next"
        hidden.write_text("".join(f"{fault.to_json()}\n" for fault in faults))
        hidden.rename(self.faults / f"{self._wave.name}.armed")

    def disarm(self) -> None:
        self.arm([])

    def resume(self, stopped: Happened) -> None:
        """Continue a worker that a fault stopped, sooner than the fault would."""
        self._thaw.pop(stopped.pid, None)
        _continue(stopped.pid)

    def resume_all(self) -> None:
        for pid in list(self._thaw):
            self._thaw.pop(pid, None)
            _continue(pid)

    def _keep(self) -> None:
        while not self._closing.wait(KEEP_EVERY_S):
            self._notice()
            for pid, when in list(self._thaw.items()):
                if time.monotonic() >= when:
                    del self._thaw[pid]
                    _continue(pid)
            for worker in self.workers:
                if self.restarts and not worker.alive:
                    worker.start()

    def _notice(self) -> None:
        wave, happened = self._wave, self.happened
        for path in self.faults.glob(f"{wave.name}.*.happened"):
            number = int(path.name.split(".")[1])
            text = path.read_text()
            if number in happened or not text.endswith("\n"):
                continue
            pid, at = text.split()
            fault = wave.faults[number]
            if int(pid) not in self._cards:
                self._cards |= {card.incarnation.pid: card.boot for card in self.cards()}
            if fault.kind is Kind.STOP:
                self._thaw[int(pid)] = time.monotonic() + fault.seconds
            happened[number] = Happened(fault, int(pid), self._cards.get(int(pid), ""), float(at))

    def wait_for(self, fault: Fault, deadline_s: float = 30.0) -> Happened:
        return until(lambda: self.happened.get(fault.number), f"{fault} happens", deadline_s)  # type: ignore[return-value]

    # ---- a look inside

    def engine_stats(self) -> list[dict[str, Any]]:
        """What `celery inspect stats` says of each worker's engine at this moment."""
        alive = sum(worker.alive for worker in self.workers)
        answers = self.app.control.inspect(timeout=2.0, limit=alive).stats() or {}
        return [answer["pool"] for answer in answers.values()]

    def keys(self, pattern: str) -> list[str]:
        found: Any = self.rooms.redis.scan_iter(f"{self.rooms.root}:{pattern}", count=1000)
        return sorted(name.decode() for name in found)


def _continue(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return
