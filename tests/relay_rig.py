"""Real workers around one Valkey, by model name, and what a client and an operator see of them."""

import itertools
import os
import secrets
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from celery import Celery
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from app.launch.programs import worker_command, worker_env
from app.launch.supervisor import die_with_parent
from relay.celery import FLUSH_CACHE
from relay.redis_url import RedisUrl
from relay.request import Record, Ring, Submission, member_id
from relay.rooms import Rooms
from relay.routing import queue_of, short_name
from relay.sampling import SamplingParams
from relay.tokens import End, TokenReader
from relay.worker_card import WorkerCard
from tests.models import VOCAB_SIZE, random_model, save_directory
from tests.processes import until

ROOT = Path(__file__).parents[1]
START_S = 90.0
END_S = 60.0
_numbers = itertools.count(1)
WORKER = {
    "DTYPE": "float32",
    "THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "KV_DIGEST": "1",
    "KV_POOL_TOKENS": "4096",
    "CHUNK_TOKENS": "64",
    "GRACE_S": "10",
}


def celery_app(url: str) -> Celery:
    """A client of the workers' broker."""
    broker = RedisUrl.parse(url).celery()
    app = Celery(broker=broker.url)
    app.conf.update(broker_transport_options=broker.transport_options, broker_use_ssl=broker.use_ssl)
    return app


class Answer(NamedTuple):
    """How a request ended; `logprobs` of the chosen tokens, where they were asked for."""

    tokens: tuple[int, ...]
    text: str
    end: End
    logprobs: tuple[float, ...]


class WorkerProcess:
    """`inside` is put before its command, where it is to run on another host: it is a child there."""

    def __init__(self, relay: "Relay", role: str, name: str, inside: Sequence[str] = (), **env: str) -> None:
        self.role = role
        self.name = name
        self._inside = bool(inside)
        self.log = relay.folder / f"{name}.log"
        parent = os.getpid()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*inside, *worker_command(role, relay.model, name)],
                cwd=ROOT,
                env={**os.environ, **worker_env(role), **relay.env, **env},
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: die_with_parent(parent),
            )

    @property
    def pid(self) -> int:
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text()) if self._inside else pid

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        if self.process.poll() is None:
            self.send(signal.SIGKILL)
        self.process.wait()


class HasUrl(Protocol):
    @property
    def url(self) -> str: ...


class Relay:
    """One model name on a server that others may share. `close` ends its workers."""

    def __init__(self, server: HasUrl, folder: Path, model: str, **env: str) -> None:
        self.folder = folder
        self.model = model
        self.env = {
            **WORKER,
            "PYTHONPATH": str(ROOT),
            "REDIS_URL": server.url,
            "SERVED_NAME": model,
            **env,
        }
        self.rooms = Rooms(server.url, model)
        self.app = celery_app(server.url)
        self.workers: list[WorkerProcess] = []
        self._reader = TokenReader(server.url, model)

    def close(self) -> None:
        for worker in self.workers:
            worker.end()
        self.rooms.close()
        self.app.close()
        self._reader.close()

    # ---- workers

    def start(self, *roles: str, inside: Sequence[str] = (), **env: str) -> list[WorkerProcess]:
        """They are not ready yet: see `ready`."""
        started = []
        for role in roles:
            name = f"{self.model}-{role}-{next(_numbers)}"
            started.append(WorkerProcess(self, role, name, inside, **env))
            self.workers.append(started[-1])
        return started

    def ready(self) -> None:
        until(lambda: len(self.cards()) == len(self._alive()), f"workers of {self.model} register", START_S)

    def stop(self, worker: WorkerProcess) -> int:
        """SIGTERM; the exit status."""
        worker.send(signal.SIGTERM)
        status = worker.process.wait(END_S)
        self.workers.remove(worker)
        return status

    def cards(self) -> list[WorkerCard]:
        names = {worker.name for worker in self._alive()}
        return [card for card in self.rooms.workers() if short_name(card.name, self.model) in names]

    def _alive(self) -> list[WorkerProcess]:
        for worker in self.workers:
            status = worker.process.poll()
            assert status is None, f"{worker.log} ended with {status}:\n{worker.log.read_text()[-3000:]}"
        return self.workers

    # ---- a client

    def submit(self, prompt: Sequence[int], ring: bool = True, **params: Any) -> str:
        return self.submit_samples(prompt, 1, ring, **params)[0]

    def submit_samples(
        self, prompt: Sequence[int], samples: int, ring: bool = True, **params: Any
    ) -> list[str]:
        """Several of one prompt; the first leads."""
        leader = f"req_{secrets.token_hex(8)}"
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 16, **params})
        group = [
            Submission(
                request_id=member_id(leader, index),
                prompt_ids=tuple(prompt),
                params=sampling.sample(index),
                timeout_ms=120_000,
                leader=leader if index else None,
            )
            for index in range(samples)
        ]
        (bell,) = self.rooms.submit(*group).rings
        if ring:
            self.ring(bell)
        return [member.request_id for member in group]

    def ring(self, bell: Ring) -> None:
        self.app.send_task(
            f"kvrelay.{bell.leg}",
            args=(bell.request_id,),
            task_id=f"{bell.request_id}:{bell.leg}:{secrets.token_hex(4)}",
            queue=queue_of(bell.leg, self.model),
        )

    def wait(self, request_id: str, deadline_s: float = END_S) -> Answer:
        def ended() -> Answer | None:
            chunk = self._reader.read(request_id)
            if chunk.end is None:
                return None
            tokens = chunk.tokens
            assert [token.position for token in tokens] == list(range(len(tokens)))
            text = "".join(token.text for token in tokens) + chunk.end.text
            logprobs = tuple(token.logprobs[0][1] for token in tokens if token.logprobs)
            return Answer(tuple(token.token_id for token in tokens), text, chunk.end, logprobs)

        what = f"{request_id} ends: {self.rooms.record(request_id)}"
        answer: Answer = until(ended, what, deadline_s)
        return answer

    def ask(self, prompt: Sequence[int], **params: Any) -> Answer:
        return self.wait(self.submit(prompt, **params))

    def record(self, request_id: str) -> Record:
        record = self.rooms.record(request_id)
        assert record is not None
        return record

    def reaches(self, request_id: str, holds: Callable[[Record], object], what: str) -> None:
        until(lambda: holds(self.record(request_id)), what, END_S)

    # ---- an operator

    def inspect(self, what: str) -> dict[str, Any]:
        """`celery inspect` of every worker of this model, by its name."""
        names = [card.name for card in self.cards()]
        asked = self.app.control.inspect(destination=names, timeout=5.0, limit=len(names))
        return getattr(asked, what)() or {}

    def engines(self) -> list[dict[str, Any]]:
        return [answer["pool"] for answer in self.inspect("stats").values()]

    def forget(self) -> None:
        """Decode workers keep no prefix, so that all KV travels again."""
        names = [card.name for card in self.cards() if card.role == "decode"]
        replies = self.app.control.broadcast(
            FLUSH_CACHE, destination=names, reply=True, limit=len(names), timeout=10
        )
        assert len(replies) == len(names), f"of {names} only {replies} forgot"

    def tasks(self) -> set[tuple[str, str]]:
        """(task, request id) of what runs."""
        return {
            (task["name"], task["args"][0]) for tasks in self.inspect("active").values() for task in tasks
        }

    def free(self) -> bool:
        """Nothing runs, and every page is free or cached."""
        engines = self.engines()
        used = [(e["running"], e["waiting"], e["held_pages"], e["quarantined_pages"]) for e in engines]
        return len(used) == len(self.workers) and set(used) == {(0, 0, 0, 0)}


def tiny_model(folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """A small random model with a tokenizer of single bytes, as a directory."""
    save_directory(random_model("llama", seed, **overrides), folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCAB_SIZE]
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    return folder
