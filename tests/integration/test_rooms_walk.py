"""Random events by workers that are late, repeat themselves and believe what is no longer so."""

import random
from typing import Any

import pytest

from relay.answers import Emission, EmitOutcome
from relay.request import Claimed, Finish, Hold, Leg, Token, Why
from relay.rooms import Rooms
from relay.tokens import TokenReader
from tests.integration.scene import LOAD, LONG_MS, PREFILLED, TRANSFER, check_integrity, claim, group
from tests.servers import RedisServer

STEPS = 500
SEEDS = (0, 1, 3, 4)  # walks that seal rooms and claim forks
ROLES = {
    **dict.fromkeys(("P1", "P2", "P3"), Leg.PREFILL),
    **dict.fromkeys(("D1", "D2", "D3"), Leg.DECODE),
    **dict.fromkeys(("U1", "U2", "U3"), Leg.BOTH),
}


class Walk:
    """Workers keep every claim they ever got, and go on using all of them."""

    def __init__(self, rooms: Rooms, rng: random.Random) -> None:
        self.rooms = rooms
        self.rng = rng
        self.requests: list[str] = []
        self.claims: list[tuple[str, Claimed]] = []
        self.accepted: dict[tuple[str, int], int] = {}  # what each position was when it was accepted first
        self.sealed_rooms = 0
        self.forks_claimed = 0

    def step(self) -> None:
        actions = {
            self.submit: 4,
            self.claim: 20,
            self.claim_some_forks: 4,
            self.publish: 12,
            self.kv_ready: 12,
            self.emit: 20,
            self.release: 4,
            self.renew: 4,
            self.fail: 1,
            self.cancel: 1,
            self.reap: 2,
            self.restart: 1,
        }
        (action,) = self.rng.choices(list(actions), list(actions.values()))
        again = self.rng.random() < 0.3
        state = self.rng.getstate()
        action()
        if again:
            self.rng.setstate(state)  # the same call once more, as a late repeat
            action()

    def submit(self) -> None:
        request_id = f"req_{self.rng.randrange(1 << 40)}"
        members = group(request_id, forks=self.rng.choice([0, 2, 2]), tokens=self.rng.randint(1, 30))
        self.rooms.submit(*members)
        self.requests += [member.request_id for member in members]

    def claim(self) -> None:
        boot = self.rng.choice(list(ROLES))
        wanted = self.rng.choice([None, *self.requests[-5:]])
        lease_ms = self.rng.choice([0, LONG_MS, LONG_MS, LONG_MS])
        free_tokens = self.rng.choice([10, 20, 100])
        got = claim(self.rooms, ROLES[boot], boot, free_tokens=free_tokens, lease_ms=lease_ms, wanted=wanted)
        if got:
            self.claims.append((boot, got.claimed))
            if got.claimed.hold.leg is Leg.BOTH and got.claimed.forks:
                self.claim_forks(boot, got.claimed)

    def claim_some_forks(self) -> None:
        leaders = [c for c in self.claims if c[1].forks and c[1].hold.leg is not Leg.PREFILL]
        if leaders:
            self.claim_forks(*self.rng.choice(leaders[-3:]))

    def claim_forks(self, boot: str, leader: Claimed) -> None:
        nonces = [f"fork-{self.rng.randrange(1 << 40)}" for _ in range(self.rng.choice([0, 1, 2, 2, 3]))]
        lease_ms = self.rng.choice([0, LONG_MS, LONG_MS])
        forked = self.rooms.claim_forks(leader.hold, boot, lease_ms, nonces)
        self.claims += [(boot, fork) for fork in forked.claimed]
        self.forks_claimed += len(forked.claimed)

    def some_claim(self, *legs: Leg) -> tuple[str, Claimed] | None:
        recent = 3 if self.rng.random() < 0.7 else 30
        found = [c for c in self.claims if c[1].hold.leg in legs][-recent:]
        return self.rng.choice(found) if found else None

    def publish(self) -> None:
        if got := self.some_claim(Leg.DECODE):
            self.rooms.publish(got[1].hold, got[1].room, [1, 2, 3], 4)

    def kv_ready(self) -> None:
        if got := self.some_claim(Leg.PREFILL):
            self.sealed_rooms += self.rooms.kv_ready(got[1].hold, got[1].room, PREFILLED, TRANSFER).ok
            self.claim_some_forks()

    def emit(self) -> None:
        batch: list[Emission] = []
        for _ in range(self.rng.randint(1, 4)):
            if got := self.some_claim(Leg.DECODE, Leg.BOTH):
                batch.append(self.emission(got[1].hold))
        before = [self.length(e.hold) for e in batch]
        for emission, length, answer in zip(batch, before, self.rooms.emit(batch)):
            if answer.outcome is EmitOutcome.GAP:
                assert emission.start_position > answer.expected
            if answer.outcome in (EmitOutcome.OK, EmitOutcome.DONE):
                for token in emission.tokens:
                    if token.position >= length:
                        self.accepted.setdefault((emission.hold.request_id, token.position), token.token_id)

    def emission(self, hold: Hold) -> Emission:
        start = max(0, self.length(hold) + self.rng.choice([-2, -1, 0, 0, 0, 0, 1]))
        ids = [self.rng.randrange(1_000) for _ in range(self.rng.randint(0, 3))]
        finish = Finish("length", text="held") if self.rng.random() < 0.1 else None
        return Emission(hold, start, [Token(start + i, t, f"<{t}>") for i, t in enumerate(ids)], finish)

    def length(self, hold: Hold) -> int:
        record = self.rooms.record(hold.request_id)
        assert record
        return record.completion_tokens

    def release(self) -> None:
        if got := self.some_claim(*Leg):
            self.rooms.release(got[1].hold, self.rng.choice(list(Why)))

    def fail(self) -> None:
        if got := self.some_claim(*Leg):
            self.rooms.fail(got[1].hold, "error", "Out of luck.")

    def cancel(self) -> None:
        if self.requests:
            self.rooms.cancel(self.rng.choice(self.requests))

    def renew(self) -> None:
        boot = self.rng.choice(list(ROLES))
        holds = [c.hold for b, c in self.claims if b == boot]
        forgotten = self.rng.random() < 0.1
        lease_ms = self.rng.choice([0, LONG_MS])
        progress = {hold.nonce: PREFILLED.stamps for hold in holds if hold.leg is Leg.PREFILL}
        self.rooms.renew(boot, LOAD, holds[::2] if forgotten else holds, lease_ms, progress)

    def restart(self) -> None:
        self.rooms.deregister(self.rng.choice(list(ROLES)))

    def reap(self) -> None:
        self.rooms.reap(lease_ms=0, suspect_after=3)


@pytest.mark.parametrize("seed", SEEDS)
def test_any_order_of_events_keeps_the_rules(
    rooms: Rooms, server: RedisServer, model: str, seed: int
) -> None:
    walk = Walk(rooms, random.Random(seed))
    ended: dict[str, Any] = {}
    for number in range(STEPS):
        walk.step()
        if number % 25 == 0:
            check_integrity(rooms)
            for record in rooms.list_requests(1_000):
                if record.request_id in ended:
                    assert record == ended[record.request_id], "an end is final"
                if record.state.terminal:
                    ended[record.request_id] = record
        if number % 100 == 0:
            _check_timelines(rooms)
    check_integrity(rooms)

    reader = TokenReader(server.url, model)
    assert len(walk.accepted) > 10
    assert walk.sealed_rooms > 0
    assert walk.forks_claimed > 0
    for request_id in walk.requests:
        for token in reader.read(request_id).tokens:
            assert token.token_id == walk.accepted[request_id, token.position]
    reader.close()
    _finish_all(rooms)
    check_integrity(rooms)
    _check_timelines(rooms)


def _check_timelines(rooms: Rooms) -> None:
    for record in rooms.list_requests(1_000):
        timeline = rooms.timeline(record.request_id)
        assert timeline
        spans = timeline.spans()
        assert [span.attempt for span in spans] == sorted(span.attempt for span in spans)
        for place, span in enumerate(spans):
            end_ms = timeline.now_ms if span.end_ms is None else span.end_ms
            assert timeline.arrived_ms <= span.start_ms <= end_ms <= timeline.now_ms, span
            assert span.parent is None or span.parent < place
            assert span.process
        going_on = [span for span in spans if span.end_ms is None]
        assert bool(going_on) is not record.state.terminal, record
        assert {span.attempt for span in going_on} <= {spans[-1].attempt}


def _finish_all(rooms: Rooms) -> None:
    """Whatever was left behind, workers that behave bring every request to an end."""
    for boot in ROLES:
        rooms.deregister(boot)
    while got := claim(rooms, Leg.BOTH, "U"):
        hold = got.claimed.hold
        (answer,) = rooms.emit([Emission(hold, len(got.claimed.emitted), [], Finish("stop"))])
        assert answer.outcome is EmitOutcome.DONE
    assert all(record.state.terminal for record in rooms.list_requests(1_000))
