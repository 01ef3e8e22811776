"""A leg goes to the worker that has the beginning of its prompt, or waits for it a moment and no longer."""

from typing import Any

import pytest

from relay.answers import Claim, Left
from relay.mailbox import Offered
from relay.marks import MARK_LETTERS, marked_tokens
from relay.request import BATCH_PRIORITY, Leg, Submission
from relay.rooms import Rooms
from relay.sampling import SamplingParams
from tests.integration.scene import LOAD, LONG_MS, Scene, card, check_integrity, group, nonce
from tests.integration.until import until
from tests.servers import RedisServer

WAIT_MS, FOR_EVER_MS = 50, 600_000
ROOMY = 100_000
A, B, C = "prefill-a", "prefill-b", "prefill-c"
FOREIGN = 10_000  # ids from there on belong to no other prompt


@pytest.fixture(autouse=True)
def _alive(rooms: Rooms) -> None:
    for boot in (A, B, C):
        rooms.register(card(boot))


class Claims:
    """Prompts and who takes them. A prompt is `begin` tokens of a kind, and others of its own."""

    def __init__(self, rooms: Rooms) -> None:
        self.rooms = rooms
        self._rooms = 0

    def submit(self, kind: int, begin: int = 1_000, end: int = 60, **more: Any) -> str:
        self._rooms += 1
        params = SamplingParams(max_tokens=16, cache_salt=more.pop("salt", None))
        own = range(FOREIGN * self._rooms, FOREIGN * self._rooms + end)
        ids = (*range(kind, kind + begin), *own)
        asked = {"timeout_ms": LONG_MS, **more}
        return self.rooms.submit(Submission(f"req-{nonce()}", ids, params, **asked)).request_id

    def claim(
        self, boot: str, leg: Leg = Leg.PREFILL, wanted: str | None = None, wait_ms: int = FOR_EVER_MS
    ) -> Claim | Left | None:
        self._rooms += 1
        return self.rooms.claim(leg, boot, nonce(), self._rooms, ROOMY, ROOMY, LONG_MS, wanted, wait_ms)

    def takes(self, boot: str, **more: Any) -> str | None:
        """Which request; None: what it could take is left."""
        got = self.claim(boot, **more)
        assert got is not None, "nothing waits"
        return got.claimed.hold.request_id if isinstance(got, Claim) else None

    def takes_in_time(self, boot: str) -> str:
        """What may be left to another worker for WAIT_MS."""
        taken: str | None = until(lambda: self.takes(boot, wait_ms=WAIT_MS), "its time is over")
        assert taken
        return taken

    def known(self, boot: str, kind: int, wait_ms: int = FOR_EVER_MS, **more: Any) -> None:
        """A worker computes a prompt of this kind, and is done with it."""
        request_id = self.submit(kind, **more)
        taken = self.takes(boot) if wait_ms == FOR_EVER_MS else self.takes_in_time(boot)
        assert taken == request_id
        self.done(request_id)

    def done(self, *request_ids: str) -> None:
        for request_id in request_ids:
            self.rooms.cancel(request_id)

    def field(self, request_id: str, name: str) -> bytes | None:
        redis: Any = self.rooms.redis
        found: bytes | None = redis.hget(f"{self.rooms.root}:req:{request_id}", name)
        return found

    def places(self) -> dict[str, int]:
        return {name[1]: times for name, times in self.rooms.counts().items() if name[0] == "beginning"}


@pytest.fixture
def claims(rooms: Rooms) -> Claims:
    return Claims(rooms)


@pytest.mark.parametrize("leg", [Leg.PREFILL, Leg.BOTH])
def test_a_next_turn_is_left_to_who_has_the_one_before(
    claims: Claims, server: RedisServer, model: str, leg: Leg
) -> None:
    claims.known(A, 1)
    turn = claims.submit(1)
    mail = Scene(claims.rooms, server, model)
    assert claims.claim(B, leg) == Left(FOR_EVER_MS)
    assert [each for each in mail.new_mail(A) if isinstance(each, Offered)] == [Offered(turn)]
    again = claims.claim(B, leg)
    assert isinstance(again, Left)
    assert 0 < again.ms <= FOR_EVER_MS
    assert mail.new_mail(A) == mail.new_mail(B) == [], "it is offered once"
    assert claims.takes(A, leg=leg, wanted=turn) == turn
    assert claims.claim(B, leg) is None
    assert claims.places() == {"new": 1, "here": 1}
    check_integrity(claims.rooms)


def test_nobody_waits_where_nobody_has_it(claims: Claims) -> None:
    claims.known(A, 1)
    claims.known(B, 5_000)
    assert claims.places() == {"new": 2}


def test_who_has_it_too_takes_it_at_once(claims: Claims) -> None:
    claims.known(A, 1)
    claims.known(B, 1, wait_ms=WAIT_MS)
    for boot in (B, A, B):
        claims.known(boot, 1)
    assert claims.places() == {"new": 1, "elsewhere": 1, "here": 3}


def test_a_dead_or_stuck_worker_costs_the_bound_and_no_more(claims: Claims) -> None:
    """It lives as far as anybody knows, and never comes."""
    claims.known(A, 1)
    turn = claims.submit(1)
    assert claims.claim(B, wait_ms=WAIT_MS) == Left(WAIT_MS)
    assert claims.takes_in_time(B) == turn
    record = claims.rooms.record(turn)
    assert record
    assert record.timings.claimed - float(claims.field(turn, "left") or 0) >= WAIT_MS
    assert claims.places() == {"new": 1, "elsewhere": 1}


def test_a_leg_is_left_once_also_when_it_comes_back(claims: Claims) -> None:
    claims.known(A, 1)
    turn = claims.submit(1)
    assert claims.takes(B) is None
    redis: Any = claims.rooms.redis
    redis.hset(f"{claims.rooms.root}:req:{turn}", "left", 1)
    assert claims.takes(B) == turn


def test_who_has_not_renewed_is_not_waited_for(claims: Claims) -> None:
    claims.known(A, 1)
    turn = claims.submit(1)
    redis: Any = claims.rooms.redis
    redis.zincrby(f"{claims.rooms.root}:workers", -3_000, A)
    assert claims.takes(B) == turn


def test_who_has_left_is_not_waited_for(claims: Claims) -> None:
    claims.known(A, 1)
    turn = claims.submit(1)
    claims.rooms.deregister(A)
    assert claims.takes(B) == turn


@pytest.mark.parametrize(("computing", "left"), [(800, True), (1_000, False)])
def test_who_has_as_much_to_compute_before_is_not_waited_for(
    claims: Claims, computing: int, left: bool
) -> None:
    claims.known(A, 1)
    claims.submit(5_000, computing, 0)
    assert claims.takes(A)
    turn = claims.submit(1)
    assert claims.takes(B) == (None if left else turn)


def test_what_it_has_of_the_prompts_before_counts_as_computed(claims: Claims) -> None:
    claims.known(A, 1)
    turns = [claims.submit(1) for _ in range(3)]
    assert claims.takes(A) == turns[0]
    assert claims.takes(A) == turns[1]
    assert claims.field(turns[0], "known_tokens") == str(marked_tokens(23)).encode()
    assert claims.takes(B) is None, "they are as good as done"


def test_who_computes_too_waits_for_itself_as_long(claims: Claims) -> None:
    claims.known(A, 1)
    for boot in (A, B):
        claims.submit(5_000 if boot == A else 7_000, 2_000, 0)
        assert claims.takes(boot)
    claims.submit(1)
    assert claims.takes(B) is None


def test_a_little_more_is_not_worth_a_wait(claims: Claims) -> None:
    claims.known(A, 1, begin=500)
    claims.known(B, 1, wait_ms=WAIT_MS, begin=500)
    claims.known(A, 1, begin=600)
    turn = claims.submit(1, begin=600)
    assert claims.takes(B) == turn, "B lacks fewer than 128 tokens of it"


def test_a_short_prompt_has_no_beginning(claims: Claims) -> None:
    claims.known(A, 1, begin=100, end=0)
    turn = claims.submit(1, begin=100, end=0)
    assert claims.takes(B) == turn
    assert claims.places() == {}


def test_the_longest_beginning_counts(claims: Claims) -> None:
    """Of two chats under one system prompt each goes where it was."""
    chats = {A: range(1, 1_300), B: (*range(1, 1_000), *range(5_000, 5_300))}

    def turn(boot: str) -> str:
        params = SamplingParams(max_tokens=16)
        return claims.rooms.submit(Submission(f"req-{nonce()}", (*chats[boot],), params, LONG_MS)).request_id

    for boot in chats:
        first = turn(boot)
        assert claims.takes_in_time(boot) == first
        claims.done(first)
    for boot, other in ((A, B), (B, A)):
        again = turn(boot)
        assert claims.takes(other) is None
        assert claims.takes(boot) == again
        claims.done(again)


def test_meanwhile_it_takes_the_next_of_its_like(claims: Claims) -> None:
    claims.known(A, 1)
    claims.known(B, 5_000)
    first, second = claims.submit(1), claims.submit(5_000)
    assert claims.takes(B, wanted=first) == second
    assert claims.takes(A) == first


def test_what_is_behind_in_rank_does_not_overtake_what_is_left(claims: Claims) -> None:
    claims.known(A, 1)
    turn = claims.submit(1)
    later = claims.submit(5_000, priority=1)
    line = claims.submit(7_000, priority=BATCH_PRIORITY)
    assert claims.takes(B) is None
    assert claims.takes(B, wanted=line) is None
    assert [claims.takes(A) for _ in range(3)] == [turn, later, line]


def test_a_claim_leaves_a_few_and_looks_no_further(claims: Claims) -> None:
    claims.known(A, 1)
    turns = [claims.submit(1) for _ in range(8)]
    claims.submit(5_000)
    assert claims.takes(B) is None
    assert claims.takes(A) == turns[0]


def test_a_near_deadline_does_not_wait(claims: Claims) -> None:
    claims.known(A, 1)
    turn = claims.submit(1, timeout_ms=1_500)
    assert claims.takes(B) == turn


def test_nobody_waits_for_the_beginning_of_another_owner(claims: Claims) -> None:
    claims.known(A, 1, salt="alice")
    for salt, left in (("bob", False), (None, False), ("alice", True)):
        turn = claims.submit(1, salt=salt)
        assert claims.takes(B) == (None if left else turn)


def test_a_fork_that_is_set_free_has_the_marks_of_its_prompt(rooms: Rooms, claims: Claims) -> None:
    leader, fork = group(tokens=600, forks=1)
    rooms.submit(leader, fork)
    assert claims.takes(A) == leader.request_id
    rooms.cancel(leader.request_id)
    assert claims.takes(B) is None
    assert claims.takes(A) == fork.request_id


def test_who_does_not_ask_writes_nothing(rooms: Rooms, claims: Claims) -> None:
    """As the only worker of its kind."""
    turn = claims.submit(1)
    assert claims.takes(A, wait_ms=0) == turn
    redis: Any = rooms.redis
    assert not redis.exists(f"{rooms.root}:begun")
    assert claims.places() == {}


def test_no_more_is_kept_than_so_many_marks_and_workers(rooms: Rooms, claims: Claims) -> None:
    redis: Any = rooms.redis
    begun = f"{rooms.root}:begun"
    redis.hset(begun, mapping={str(number): A for number in range(65_536)})
    claims.known(A, 1)
    assert redis.hlen(begun) == 65_536
    redis.delete(begun)
    boots = [f"prefill-{number:016x}" for number in range(12)]
    for boot in boots:
        rooms.register(card(boot))
        claims.known(boot, 1, wait_ms=WAIT_MS)
    shortest = (claims.field(claims.submit(1), "marks") or b"")[:MARK_LETTERS]
    assert redis.hget(begun, shortest).decode().split() == boots[-9:]


def test_a_repeated_claim_is_answered_alike(claims: Claims) -> None:
    claims.known(A, 1)
    turn = claims.submit(1)
    first = claims.rooms.claim(Leg.PREFILL, A, "same", 99, ROOMY, ROOMY, LONG_MS, None, WAIT_MS)
    again = claims.rooms.claim(Leg.PREFILL, A, "same", 99, ROOMY, ROOMY, LONG_MS, None, WAIT_MS)
    assert isinstance(first, Claim)
    assert isinstance(again, Claim)
    assert first.claimed.hold.request_id == turn
    assert first.claimed == again.claimed
    assert claims.rooms.renew(A, LOAD, [first.claimed.hold], LONG_MS).lost == []
