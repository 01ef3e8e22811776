"""One request on its way through the state tables, and what the keys must obey on that way."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from relay.answers import Claim, Emission, EmitOutcome, Left, Prefilled, Transfer
from relay.geometry import Geometry
from relay.mailbox import Mail, Mailbox
from relay.request import Finish, Hold, Leg, State, Submission, Token, Why, member_id
from relay.rooms import Rooms
from relay.sampling import SamplingParams
from relay.stamps import Stamps
from relay.stretches import Stretch
from relay.worker_card import Incarnation, Load, WorkerCard
from tests.servers import RedisServer

LONG_MS = 600_000
ROOMY = 1_000  # tokens
SCANNED = 10_000  # keys that one step of a scan looks at: those of other tests are there too
LOAD = Load(4, ROOMY, 0, 0, 10, 0, 0, 0)
PREFILLED = Prefilled(Stamps(2, chunks=(Stretch(1.7e12, 1.7e12 + 15.0, 3),)))
TRANSFER = Transfer(us=300, bytes=4096, descriptors=2, spared_bytes=2048)

_ids = itertools.count(1)


def submission(request_id: str | None = None, tokens: int = 3, **more: Any) -> Submission:
    return Submission(
        request_id=request_id or f"req_{next(_ids)}",
        prompt_ids=tuple(range(1, tokens + 1)),
        params=SamplingParams(max_tokens=16),
        **{"timeout_ms": LONG_MS, **more},
    )


def group(request_id: str | None = None, forks: int = 2, **more: Any) -> list[Submission]:
    """A leader and its forks."""
    leader = submission(request_id, **more)
    ids = [member_id(leader.request_id, index) for index in range(1, forks + 1)]
    return [leader, *(replace(leader, request_id=fork, leader=leader.request_id) for fork in ids)]


def card(boot: str, role: str = "prefill", load: Load = LOAD) -> WorkerCard:
    geometry = Geometry("print", "float32", 1, 1, 8, 16, 10)
    return WorkerCard(Incarnation.here(boot), f"{role}@host", role, geometry, ROOMY, b"\x00agent\xff", load)


def tokens(start: int, count: int) -> list[Token]:
    return [Token(position, 100 + position, f"t{position} ") for position in range(start, start + count)]


def nonce() -> str:
    return f"nonce-{next(_ids)}"


def claim(
    rooms: Rooms,
    leg: Leg,
    boot: str,
    *,
    free_tokens: int = ROOMY,
    lease_ms: int = LONG_MS,
    wanted: str | None = None,
) -> Claim | None:
    taken = rooms.claim(leg, boot, nonce(), next(_ids), free_tokens, ROOMY, lease_ms, wanted)
    assert not isinstance(taken, Left), "nobody asked who has its beginning"
    return taken


@dataclass
class View:
    """Everything about one request that a transition may change."""

    state: str
    room: str | None  # the state of its latest room
    queue: str | None
    leases: frozenset[str]
    attempt: int
    entries: int  # of the token stream, its end included
    fields: dict[bytes, bytes] = field(repr=False)


class Scene:
    """`reach` drives a new request to a place by real calls. Workers: P and D for a pair, U if unified.

    It may lead `forks`, which stay where they are."""

    def __init__(self, rooms: Rooms, server: RedisServer, model: str, forks: int = 0) -> None:
        self.rooms = rooms
        self.forks = forks
        self.url = server.url
        self.model = model
        self.id = f"req_{next(_ids)}"
        self.room = 0
        self.p: Hold = Hold(self.id, Leg.PREFILL, 1, "nobody")
        self.d: Hold = Hold(self.id, Leg.DECODE, 1, "nobody")
        self._mail_read: dict[str, int] = {}

    def let_deadlines_pass(self) -> None:
        """As if the request and its forks had been submitted long ago, unless they have ended."""
        redis: Any = self.rooms.redis
        for request_id in (self.id, *(member_id(self.id, index + 1) for index in range(self.forks))):
            if redis.zadd(f"{self.rooms.root}:deadline", {request_id: 1}, xx=True, ch=True):
                redis.hset(f"{self.rooms.root}:req:{request_id}", "deadline", 1)

    def reach(self, place: str) -> None:
        rooms = self.rooms
        if place == "absent":
            return
        rooms.submit(*group(self.id, self.forks))
        if place == "queued":
            return
        if place == "unified":
            self.claim_unified()
            return
        self.claim_prefill()
        if place == "open":
            return
        self.claim_decode()
        if place == "reserved":
            return
        assert rooms.publish(self.d, self.room, [7, 8], 3).ok
        if place == "published":
            return
        if place in ("cancelled", "failed"):
            if place == "cancelled":
                rooms.cancel(self.id)
            else:
                assert rooms.fail(self.p, "error", "The model cannot run this.").ok
            return
        assert rooms.kv_ready(self.p, self.room, PREFILLED, TRANSFER).ok
        if place == "ready":
            return
        assert self.emit(0, 2) is EmitOutcome.OK
        if place == "decode":
            return
        assert place == "finished"
        assert self.emit(2, 1, Finish("stop", 102)) is EmitOutcome.DONE

    def claim_prefill(self) -> None:
        got = claim(self.rooms, Leg.PREFILL, "P", wanted=self.id)
        assert got
        self.p, self.room = got.claimed.hold, got.claimed.room

    def claim_decode(self) -> None:
        got = claim(self.rooms, Leg.DECODE, "D", wanted=self.id)
        assert got
        self.d = got.claimed.hold

    def claim_unified(self) -> None:
        got = claim(self.rooms, Leg.BOTH, "U", wanted=self.id)
        assert got
        self.d = got.claimed.hold

    def emit(self, start: int, count: int, finish: Finish | None = None) -> EmitOutcome:
        return self.rooms.emit([self.emission(start, count, finish)])[0].outcome

    def emission(self, start: int, count: int, finish: Finish | None = None) -> Emission:
        return Emission(self.d, start, tokens(start, count), finish)

    def release(self, leg: Leg, why: Why = Why.DRAIN) -> bool:
        return self.rooms.release(self.p if leg is Leg.PREFILL else self.d, why).ok

    def new_mail(self, boot: str) -> list[Mail]:
        """What came into a mailbox since the last call."""
        box = Mailbox(self.url, self.model, boot)
        mail = box.read(block_ms=0)
        box.close()
        seen = self._mail_read.get(boot, 0)
        self._mail_read[boot] = len(mail)
        return mail[seen:]

    def view(self) -> View | None:
        redis: Any = self.rooms.redis
        root = self.rooms.root
        fields = redis.hgetall(f"{root}:req:{self.id}")
        if not fields:
            return None
        queues = [leg for leg in ("prefill", "decode") if redis.zscore(f"{root}:queue:{leg}", self.id)]
        assert len(queues) < 2
        leases = [m.decode() for m in redis.zrange(f"{root}:lease", 0, -1)]
        room = redis.hget(f"{root}:room:{self.room}", "state") if self.room else None
        return View(
            state=fields[b"state"].decode(),
            room=room.decode() if room else None,
            queue=queues[0] if queues else None,
            leases=frozenset(m.split("/")[1] for m in leases if m.startswith(f"{self.id}/")),
            attempt=int(fields[b"attempt"]),
            entries=redis.xlen(f"{root}:tok:{self.id}:0"),
            fields=fields,
        )


def check_integrity(rooms: Rooms) -> None:
    """What holds for all keys of a model after any call."""
    redis: Any = rooms.redis
    root = rooms.root
    prefill, decode, deadline, ended = (
        {i.decode() for i in redis.zrange(f"{root}:{name}", 0, -1)}
        for name in ("queue:prefill", "queue:decode", "deadline", "ended")
    )
    ended = {member.split("/")[0] for member in ended}
    leases = {m.decode() for m in redis.zrange(f"{root}:lease", 0, -1)}
    names = _names(rooms)
    owned: dict[str, tuple[str, str]] = {}
    for boot in names["legs"]:
        for claim_nonce, member in redis.hgetall(f"{root}:legs:{boot}").items():
            assert member.decode() not in owned
            owned[member.decode()] = (boot, claim_nonce.decode())
    assert owned.keys() == leases
    retracted = {
        (boot, i.decode()) for boot in names["retracted"] for i in redis.smembers(f"{root}:retracted:{boot}")
    }

    forks = [
        (leader, i.decode())
        for leader in names["forks"]
        for i in redis.lrange(f"{root}:forks:{leader}", 0, -1)
    ]
    assert len(set(forks)) == len(forks)

    ids = [i.decode() for i in redis.zrange(f"{root}:requests", 0, -1)]
    assert prefill | decode | deadline | ended <= set(ids)
    by_owner = {
        request_id.decode(): owner
        for owner in names["owned"]
        for request_id in redis.zrange(f"{root}:owned:{owner}", 0, -1)
    }
    assert by_owner.keys() == set(ids)
    records = {
        request_id: {name.decode(): value.decode() for name, value in fields.items()}
        for request_id, fields in zip(ids, _each(redis, ids, lambda ask, i: ask.hgetall(f"{root}:req:{i}")))
    }
    room_names = [f"{root}:room:{record.get('room', '')}" for record in records.values()]
    found = zip(
        records.items(),
        _each(redis, ids, lambda ask, i: ask.xrange(f"{root}:tok:{i}:0")),
        _each(redis, ids, lambda ask, i: ask.exists(f"{root}:prompt:{i}")),
        _each(redis, ids, lambda ask, i: ask.pttl(f"{root}:req:{i}")),
        _each(redis, ids, lambda ask, i: ask.pttl(f"{root}:tok:{i}:0")),
        _each(redis, room_names, lambda ask, room: ask.hget(room, "state")),
        _each(redis, room_names, lambda ask, room: ask.pttl(room)),
        strict=True,
    )
    open_bytes = 0
    for (request_id, record), stream, has_prompt, ttl_ms, stream_ttl_ms, room, room_ttl_ms in found:
        state = State(record["state"])
        assert by_owner[request_id] == record["owner"]
        legs = {leg for leg in ("prefill", "decode") if f"{request_id}/{leg}" in leases}
        for leg in legs:
            assert owned[f"{request_id}/{leg}"] == (record[f"{leg[0]}_boot"], record[f"{leg[0]}_nonce"])
        waits = {name for name, queue in (("prefill", prefill), ("decode", decode)) if request_id in queue}

        _check_stream(stream, int(record["tokens"]), state)
        assert (request_id in deadline) == (not state.terminal), record
        assert (request_id in ended) == state.terminal
        assert has_prompt == (not state.terminal)
        assert (ttl_ms > 0) == state.terminal
        assert (stream_ttl_ms > 0) == state.terminal
        assert ("retracted_by" in record) == any(i == request_id for _, i in retracted)
        if "retracted_by" in record:
            assert (record["retracted_by"], request_id) in retracted

        assert ("leader" in record) == any(i == request_id for _, i in forks)
        if "leader" in record:
            assert (record["leader"], request_id) in forks
            assert not State(records[record["leader"]]["state"]).terminal, "a fork is left behind"
            assert state is State.QUEUED

        if state.terminal:
            assert not legs | waits
            assert room is None or (room == b"ended" and room_ttl_ms > 0)
            continue
        open_bytes += int(record["bytes"])
        if state is State.QUEUED:
            assert (legs, room) == (set(), None)
            assert waits == (set() if "leader" in record else {"prefill"})
            assert not {"p_boot", "d_boot", "room"} & record.keys()
        elif state is State.PREFILL:
            assert "prefill" in legs
            assert waits == ({"decode"} if "decode" not in legs else set())
            assert room in (b"open", b"published")
            assert room == b"open" or "decode" in legs
            assert room_ttl_ms == -1
        else:
            assert (waits, legs) == (set(), {"decode"})
            assert room == b"sealed" if "room" in record else state is State.DECODE
    assert int(redis.hget(f"{root}:totals", "open_bytes") or 0) == open_bytes
    assert not redis.exists(f"{root}:room"), "a request without a room wrote to one"


def _names(rooms: Rooms) -> dict[str, set[str]]:
    """What the last part of a key names, by the part before it: of owners, leaders and requests."""
    redis: Any = rooms.redis
    names: dict[str, set[str]] = defaultdict(set)
    for key in redis.scan_iter(f"{rooms.root}:*", count=SCANNED):
        kind, _, name = key.decode().removeprefix(f"{rooms.root}:").partition(":")
        names[kind].add(name)
    return names


def _each(redis: Any, names: Iterable[str], ask: Callable[[Any, str], object]) -> list[Any]:
    """What the server answers about each, asked in one go."""
    pipeline = redis.pipeline(transaction=False)
    for name in names:
        ask(pipeline, name)
    answers: list[Any] = pipeline.execute()
    return answers


def _check_stream(entries: list[tuple[bytes, Any]], count: int, state: State) -> None:
    """Positions are gap-free, and exactly the ended requests have an end."""
    end = [f"{count + 1}-2".encode()] if state.terminal else []
    assert [entry for entry, _ in entries] == [f"{p + 1}-1".encode() for p in range(count)] + end
