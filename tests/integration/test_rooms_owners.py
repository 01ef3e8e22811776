"""Requests of API keys: who sees which, and how much one key may submit in a minute."""

from typing import Any

import pytest

from relay.answers import Emission, SubmitOutcome
from relay.request import Finish, Leg, Why
from relay.rooms import Rooms
from tests.integration.scene import check_integrity, claim, group, submission, tokens
from tests.integration.until import until

MINUTE_MS = 60_000
NEW, LIMITED = SubmitOutcome.NEW, SubmitOutcome.LIMITED


def minute_of(rooms: Rooms) -> int:
    redis: Any = rooms.redis
    seconds, micros = redis.time()
    return int((seconds * 1000 + micros / 1000) // MINUTE_MS)


def used(rooms: Rooms, owner: str, what: str) -> int:
    """Over this minute and its neighbours: a test may run over the end of one."""
    redis: Any = rooms.redis
    minutes = range(minute_of(rooms) - 1, minute_of(rooms) + 2)
    return sum(int(redis.hget(f"{rooms.root}:usage:{owner}:{minute}", what) or 0) for minute in minutes)


def use(rooms: Rooms, owner: str, minutes_ago: int, requests: int) -> None:
    redis: Any = rooms.redis
    redis.hset(f"{rooms.root}:usage:{owner}:{minute_of(rooms) - minutes_ago}", "requests", requests)


def finish(rooms: Rooms, count: int) -> None:
    """Serve the next request with `count` tokens."""
    found = claim(rooms, Leg.BOTH, "U")
    assert found
    rooms.emit([Emission(found.claimed.hold, 0, tokens(0, count), Finish("length"))])


def test_an_owner_sees_its_own_and_an_admin_all(rooms: Rooms) -> None:
    ids = [rooms.submit(submission(owner=owner)).request_id for owner in ("a", "b", "a", "")]
    rooms.cancel(ids[2])
    assert [r.request_id for r in rooms.list_requests(9, owner="a")] == [ids[2], ids[0]]
    assert [r.request_id for r in rooms.list_requests(9, before=ids[2], owner="a")] == [ids[0]]
    assert [r.request_id for r in rooms.list_requests(9, owner="")] == [ids[3]]
    assert [r.request_id for r in rooms.list_requests(9)] == ids[::-1]
    assert rooms.list_requests(9, before=ids[1], owner="a") == [], "nobody finds out about others by paging"
    assert [r.owner for r in rooms.list_requests(9)] == ["", "a", "b", "a"]
    check_integrity(rooms)


def test_so_many_requests_a_minute(rooms: Rooms) -> None:
    def submit(**more: Any) -> SubmitOutcome:
        return rooms.submit(submission(owner="a", requests_per_minute=2, **more)).outcome

    first = submission(owner="a", requests_per_minute=2, idempotency_key="k", body_hash="h")
    assert rooms.submit(first).outcome is NEW
    assert submit() is NEW
    refused = rooms.submit(submission("req_refused", owner="a", requests_per_minute=2))
    assert refused.outcome is LIMITED
    assert 0 < refused.early_ms <= 2 * MINUTE_MS
    assert rooms.record("req_refused") is None
    assert rooms.submit(first).outcome is NEW, "what was accepted is answered again, and counts once"
    assert submit(idempotency_key="k", body_hash="h") is SubmitOutcome.DUPLICATE
    assert rooms.submit(submission(owner="b", requests_per_minute=2)).outcome is NEW, "others have their own"
    assert rooms.submit(submission(owner="a")).outcome is NEW, "and so has who has no limit now"
    check_integrity(rooms)


def test_a_group_is_one_request_and_its_prompt_counts_once(rooms: Rooms) -> None:
    assert rooms.submit(*group(forks=3, owner="a", tokens_per_minute=100)).outcome is NEW
    assert (used(rooms, "a", "requests"), used(rooms, "a", "tokens")) == (1, 3)


def test_answers_count_when_they_end(rooms: Rooms) -> None:
    def submit(prompt_tokens: int) -> SubmitOutcome:
        return rooms.submit(submission(tokens=prompt_tokens, owner="a", tokens_per_minute=20)).outcome

    assert submit(8) is NEW
    assert used(rooms, "a", "tokens") == 8
    finish(rooms, 9)
    assert used(rooms, "a", "tokens") == 17
    assert submit(4) is LIMITED
    assert submit(3) is NEW


def test_a_cancelled_answer_counts_as_far_as_it_came(rooms: Rooms) -> None:
    request_id = rooms.submit(submission(tokens=5, owner="a", tokens_per_minute=20)).request_id
    found = claim(rooms, Leg.BOTH, "U")
    assert found
    rooms.emit([Emission(found.claimed.hold, 0, tokens(0, 4))])
    rooms.cancel(request_id)
    rooms.cancel(request_id)
    assert used(rooms, "a", "tokens") == 9


def test_without_a_limit_nothing_is_counted(rooms: Rooms) -> None:
    rooms.submit(submission(owner="a"))
    finish(rooms, 2)
    assert not list(rooms.redis.scan_iter(f"{rooms.root}:usage:*"))


def test_the_minute_before_counts_by_what_is_left_of_it(rooms: Rooms) -> None:
    use(rooms, "a", minutes_ago=1, requests=1_000_000)
    answer = rooms.submit(submission(owner="a", requests_per_minute=1))
    assert answer.outcome is LIMITED
    redis: Any = rooms.redis
    seconds, micros = redis.time()
    left_ms = MINUTE_MS - (seconds % 60 * 1000 + micros / 1000)
    assert answer.early_ms == pytest.approx(left_ms, abs=2_000)


def test_what_never_fits_is_refused(rooms: Rooms) -> None:
    answer = rooms.submit(submission(tokens=30, owner="a", tokens_per_minute=20))
    assert (answer.outcome, answer.early_ms) == (LIMITED, MINUTE_MS)


def test_counters_go(rooms: Rooms) -> None:
    rooms.submit(submission(owner="a", requests_per_minute=2))
    (key,) = rooms.redis.scan_iter(f"{rooms.root}:usage:*")
    ttl_ms: Any = rooms.redis.pttl(key)
    assert 0 < ttl_ms <= 2 * MINUTE_MS


def test_what_an_earlier_version_left_is_forgotten_too(rooms: Rooms) -> None:
    """Its ended requests name no owner, and its open ones no priority."""
    redis: Any = rooms.redis
    redis.zadd(f"{rooms.root}:ended", {"req_old": 1})
    redis.zadd(f"{rooms.root}:requests", {"req_old": 1})
    rooms.submit(submission("req_open"))
    redis.hdel(f"{rooms.root}:req:req_open", "owner", "priority")
    found = claim(rooms, Leg.BOTH, "U")
    assert found
    assert rooms.release(found.claimed.hold, Why.DRAIN).ok
    until(lambda: rooms.reap(1_000, 3) and not redis.zcard(f"{rooms.root}:ended"), "the index forgets it")
    record = rooms.cancel("req_open").record
    assert record
    assert record.owner == ""
    assert [r.request_id for r in rooms.list_requests(9)] == ["req_open"]
