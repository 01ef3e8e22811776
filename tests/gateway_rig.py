"""A real gateway process, the HTTP calls tests make to it, and a worker whose moves a test scripts."""

import http.client
import json
import os
import secrets
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from prometheus_client.samples import Sample
from redis.exceptions import RedisError

from app.launch.programs import gateway_command
from relay.answers import Claim, Emission, EmitOutcome, Prefilled
from relay.geometry import Geometry
from relay.model_file import default_model_path
from relay.request import Claimed, Finish, Leg, Token
from relay.rooms import Rooms
from relay.stamps import Stamps
from relay.stretches import Stretch
from relay.tokenizer import Tokenizer
from relay.worker_card import Incarnation, Load, WorkerCard
from tests.samples import samples, value_of
from tests.servers import free_port

START_S = 90.0
DEADLINE_S = 30.0
LEASE_MS = 60_000
REGISTER_AGAIN_S = 2.0  # a worker that is silent for ten seconds is none
ROOT = Path(__file__).parents[1]
LOAD = Load(
    slots=8,
    free_tokens=4096,
    running=0,
    waiting=0,
    free_pages=256,
    cached_pages=0,
    held_pages=0,
    quarantined_pages=0,
)


class Reply(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    raw: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.raw)


class Event(NamedTuple):
    """One server-sent event; `comment` for lines that begin with a colon."""

    name: str
    event_id: int | str | None  # a number, or several with dots between them
    data: Any
    comment: str | None = None


class EventStream:
    """Reads events one by one from a response that stays open."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection
        self._response = connection.getresponse()
        self.status = self._response.status
        self.headers = self._response.headers

    def __iter__(self) -> Iterator[Event]:
        name, data, comment = "message", None, None
        event_id: int | str | None = None
        while line := self._response.readline():
            text = line.decode().rstrip("\n")
            if text:
                field, _, value = text.partition(": ")
                match field:
                    case "event":
                        name = value
                    case "id":
                        event_id = int(value) if value.isdigit() else value
                    case "data":
                        data = value if value == "[DONE]" else json.loads(value)
                    case "":
                        comment = value
            elif data is not None or comment is not None:
                yield Event(name, event_id, data, comment)
                name, event_id, data, comment = "message", None, None, None
            else:
                continue

    def events(self, count: int | None = None) -> list[Event]:
        """The next `count` events with data, or all until the stream ends."""
        found: list[Event] = []
        for event in self:
            if event.data is None:
                continue
            found.append(event)
            if len(found) == count:
                break
        return found

    def close(self) -> None:
        # The response holds the socket open beyond the connection.
        self._response.close()
        self._connection.close()


class GatewayProcess:
    """gunicorn with the gateway, as it is deployed. `inside` is put before its command, where it is to run on
    another host, at `address`; it ends with that host."""

    def __init__(
        self,
        redis_url: str,
        model: str,
        log: Path,
        address: str = "127.0.0.1",
        inside: Sequence[str] = (),
        **settings: str,
    ) -> None:
        self.address = address
        self.port = free_port()
        self._inside = tuple(inside)
        self._log = log
        self._environ = os.environ | {
            "REDIS_URL": redis_url,
            "SERVED_NAME": model,
            "HOST": address,
            "PORT": str(self.port),
            "GATEWAY_THREADS": "24",
            "GRACE_S": "0",
            **settings,
        }

    def __enter__(self) -> Self:
        command = [*self._inside, *gateway_command()]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=self._environ, stdout=log, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + START_S
        while True:
            with suppress(OSError):
                if self.call("GET", "/health").status == 200:
                    return self
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, f"the gateway did not answer\n{self._log.read_text()}"
            time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"

    @property
    def worker_process_id(self) -> int:
        """The process that serves; the other one only watches it."""
        (child,) = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(child)

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        """`body` is sent as JSON; underscores of header names become dashes."""
        connection = self.open(method, path, body, **headers)
        response = connection.getresponse()
        reply = Reply(response.status, response.headers, response.read())
        connection.close()
        return reply

    def stream(self, method: str, path: str, body: Any = None, **headers: str) -> EventStream:
        return EventStream(self.open(method, path, body, **headers))

    def open(self, method: str, path: str, body: Any = None, **headers: str) -> http.client.HTTPConnection:
        """Send a request and leave its reply unread."""
        connection = http.client.HTTPConnection(self.address, self.port, timeout=DEADLINE_S)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            named["Content-Type"] = "application/json"
        connection.request(method, path, None if body is None else json.dumps(body), named)
        return connection


def wait_for_followers(gateway: GatewayProcess, count: int) -> None:
    """Until so many streams and polls wait in the gateway."""
    eventually(
        lambda: value_of(scraped(gateway, "/metrics"), "kvrelay_followed_streams") == count,
        f"{count} followers",
    )


def scraped(gateway: GatewayProcess, path: str) -> list[Sample]:
    return samples(gateway.call("GET", path).raw.decode())


class ScriptedWorker:
    """Registered in Redis like any worker until it is closed, however slow its test is; it does what a test
    tells it and computes nothing."""

    def __init__(self, rooms: Rooms, role: str = "unified", capacity_tokens: int = 4096) -> None:
        self.rooms = rooms
        self.boot = secrets.token_hex(8)
        self.card = WorkerCard(
            incarnation=Incarnation.here(self.boot),
            name=f"{role}@test",
            role=role,
            geometry=Geometry("test", "float32", 1, 1, 8, 16, capacity_tokens // 16),
            capacity_tokens=capacity_tokens,
            agent_metadata=b"",
            load=LOAD,
            metrics="10.0.0.1:9400",
        )
        self._card_lock = threading.Lock()
        self._closing = threading.Event()
        self._alive = threading.Thread(target=self._stay_alive, name="scripted worker", daemon=True)
        rooms.register(self.card)
        self._alive.start()

    def show(self, **fields: Any) -> None:
        """Register with another card: some of its fields."""
        with self._card_lock:
            self.card = self.card._replace(**fields)
            self.rooms.register(self.card)

    def _stay_alive(self) -> None:
        while not self._closing.wait(REGISTER_AGAIN_S):
            with suppress(RedisError):
                self.show()

    def claim(self, leg: Leg = Leg.BOTH, request_id: str | None = None) -> Claimed:
        """Wait for a leg and take it."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            nonce, room = secrets.token_hex(8), secrets.randbits(63)
            claim = self.rooms.claim(leg, self.boot, nonce, room, 4096, 4096, LEASE_MS, request_id)
            if isinstance(claim, Claim):
                assert request_id in (None, claim.claimed.hold.request_id), "another request was in the way"
                return claim.claimed
            time.sleep(0.005)
        raise AssertionError(f"no {leg} leg to claim in {DEADLINE_S} s")

    def emit(
        self,
        claimed: Claimed,
        tokens: Sequence[Token],
        finish: Finish | None = None,
        start: int | None = None,
    ) -> EmitOutcome:
        """Append tokens, from `start` if there are none; a unified worker reports its prefill too."""
        if start is None:
            start = tokens[0].position if tokens else 0
        prefilled = None
        if start == 0 and claimed.hold.leg is Leg.BOTH:
            begun = claimed.clock.server_ms
            prefilled = Prefilled(Stamps(3, chunks=(Stretch(begun, begun + 10.0, len(claimed.prompt_ids)),)))
        emission = Emission(claimed.hold, start, tokens, finish, prefilled)
        (emitted,) = self.rooms.emit([emission])
        return emitted.outcome

    def close(self) -> None:
        self._closing.set()
        self._alive.join()
        self.rooms.deregister(self.boot)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(RedisError):
            self.close()


class Answering(threading.Thread):
    """Serves every request with the same words, one token per step, until its test ends."""

    def __init__(self, worker: ScriptedWorker, words: list[Token], finish: Finish) -> None:
        super().__init__(daemon=True)
        self._worker = worker
        self._words = words
        self._finish = finish
        self._stopping = threading.Event()
        self.claimed: list[Claimed] = []

    def run(self) -> None:
        while not self._stopping.is_set():
            nonce = secrets.token_hex(8)
            claim = self._worker.rooms.claim(Leg.BOTH, self._worker.boot, nonce, 0, 4096, 4096, LEASE_MS)
            if not isinstance(claim, Claim):
                self._stopping.wait(0.005)
                continue
            self.claimed.append(claim.claimed)
            for token in self._words:
                self._worker.emit(claim.claimed, [token])
            self._worker.emit(claim.claimed, [], self._finish, start=len(self._words))

    @contextmanager
    def running(self) -> Iterator["Answering"]:
        self.start()
        try:
            yield self
        finally:
            self._stopping.set()
            self.join()


def default_tokenizer() -> Tokenizer:
    return Tokenizer.load(default_model_path())


def words(tokenizer: Tokenizer, text: str, logprobs: bool = False) -> list[Token]:
    """The tokens of an ASCII `text`, as a worker emits them."""
    ids = tokenizer.encode(text)
    return [
        Token(
            position,
            token_id,
            tokenizer.token_text(token_id),
            [[token_id, -0.5], [token_id, -0.5], [ids[0] + 1, -1.5]] if logprobs else None,
        )
        for position, token_id in enumerate(ids)
    ]


def cancel_all(rooms: Rooms) -> None:
    """End what a test left open, so that no later one claims it."""
    for record in rooms.list_requests(1000):
        rooms.cancel(record.request_id)


def eventually(condition: Any, what: str) -> None:
    """Poll until `condition()` is true."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in {DEADLINE_S} s"
        time.sleep(0.01)
