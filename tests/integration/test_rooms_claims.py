"""Who gets which leg, when nobody may overtake any more, and what the reaper rings and expires."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from relay.answers import Emission
from relay.request import BATCH_PRIORITY, MAX_PRIORITY, Hold, Leg, Ring, State, Why
from relay.rooms import Rooms
from tests.integration.scene import (
    LOAD,
    LONG_MS,
    PREFILLED,
    ROOMY,
    TRANSFER,
    card,
    check_integrity,
    claim,
    submission,
    tokens,
)
from tests.integration.until import until

BIG, SMALL = 100, 5  # tokens


def submit(rooms: Rooms, *sizes: int) -> list[str]:
    return [rooms.submit(submission(tokens=size)).request_id for size in sizes]


def take(
    rooms: Rooms, leg: Leg, boot: str = "W", free_tokens: int = 1_000, wanted: str | None = None
) -> str | None:
    got = claim(rooms, leg, boot, free_tokens=free_tokens, wanted=wanted)
    return got.claimed.hold.request_id if got else None


def take_hold(rooms: Rooms, leg: Leg, boot: str, wanted: str | None = None) -> Hold:
    got = claim(rooms, leg, boot, wanted=wanted)
    assert got
    return got.claimed.hold


def decode_alone(rooms: Rooms, boot: str, request_id: str) -> Hold:
    """Bring a queued request to `ready` with `boot` as its decode worker."""
    got = claim(rooms, Leg.PREFILL, "P", wanted=request_id)
    assert got
    d = take_hold(rooms, Leg.DECODE, boot, wanted=request_id)
    assert d.request_id == got.claimed.hold.request_id == request_id
    assert rooms.publish(d, got.claimed.room, [1], 0).ok
    assert rooms.kv_ready(got.claimed.hold, got.claimed.room, PREFILLED, TRANSFER).ok
    return d


def let_wait(rooms: Rooms, request_id: str, leg: Leg, ms: int) -> None:
    """As if the leg had been queued, and rung for, that much earlier."""
    redis: Any = rooms.redis
    key = f"{rooms.root}:req:{request_id}"
    for name in (f"{leg[0]}_queued", f"{leg[0]}_rung"):
        redis.hset(key, name, float(redis.hget(key, name)) - ms)


def test_first_come_first_served(rooms: Rooms) -> None:
    ids = submit(rooms, SMALL, SMALL, SMALL)
    assert [take(rooms, Leg.PREFILL) for _ in range(4)] == [*ids, None]


@pytest.mark.parametrize("leg", [Leg.PREFILL, Leg.DECODE])
def test_what_is_past_its_deadline_ends_where_it_would_be_claimed(rooms: Rooms, leg: Leg) -> None:
    late, other = submit(rooms, SMALL, SMALL)
    if leg is Leg.DECODE:
        assert [take(rooms, Leg.PREFILL) for _ in range(2)] == [late, other]
    redis: Any = rooms.redis
    redis.hset(f"{rooms.root}:req:{late}", "deadline", 1)
    assert [take(rooms, leg) for _ in range(2)] == [other, None]
    record = rooms.record(late)
    assert record
    assert (record.state, record.error_code) == (State.FAILED, "timeout")
    check_integrity(rooms)


def test_a_claim_tells_what_is_left_until_the_deadline(rooms: Rooms) -> None:
    rooms.submit(submission(timeout_ms=60_000))
    got = claim(rooms, Leg.BOTH, "U")
    assert got
    assert 30_000 < got.claimed.left_ms <= 60_000


def test_retracted_then_recovered_then_new(rooms: Rooms) -> None:
    new, recovered, retracted = submit(rooms, SMALL, SMALL, SMALL)
    d = decode_alone(rooms, "D", retracted)
    p = take_hold(rooms, Leg.PREFILL, "P", wanted=recovered)
    assert rooms.release(p, Why.DRAIN).ok
    assert rooms.release(d, Why.RETRACT).ok
    for leg in (Leg.PREFILL, Leg.DECODE):
        assert [take(rooms, leg) for _ in range(3)] == [retracted, recovered, new]
    check_integrity(rooms)


@pytest.mark.parametrize("leg", [Leg.PREFILL, Leg.DECODE])
def test_priorities_go_before_arrival_and_batch_lines_last(rooms: Rooms, leg: Leg) -> None:
    def of(priority: int) -> str:
        return rooms.submit(submission(tokens=SMALL, priority=priority)).request_id

    line, late, second, first, third = of(BATCH_PRIORITY), of(MAX_PRIORITY), of(0), of(-MAX_PRIORITY), of(0)
    if leg is Leg.DECODE:
        while take(rooms, Leg.PREFILL, "P"):
            pass
    assert [take(rooms, leg) for _ in range(5)] == [first, second, third, late, line]


def test_a_line_that_was_handed_back_goes_before_other_lines_only(rooms: Rooms) -> None:
    line, recovered = [rooms.submit(submission(priority=BATCH_PRIORITY)).request_id for _ in range(2)]
    assert rooms.release(take_hold(rooms, Leg.PREFILL, "P", wanted=recovered), Why.DRAIN).ok
    (interactive,) = submit(rooms, SMALL)
    assert [take(rooms, Leg.PREFILL) for _ in range(3)] == [interactive, recovered, line]


def test_a_decode_leg_that_was_handed_back_goes_before_older_ones(rooms: Rooms) -> None:
    older, newer = submit(rooms, SMALL, SMALL)
    assert {take(rooms, Leg.PREFILL), take(rooms, Leg.PREFILL)} == {older, newer}
    hold = take_hold(rooms, Leg.DECODE, "D", wanted=newer)
    assert rooms.release(hold, Why.PRESSURE).ok
    assert rooms.renew("D", LOAD, [hold], LONG_MS).lost[0].why == "requeued"
    assert [take(rooms, Leg.DECODE) for _ in range(2)] == [newer, older]


def test_a_ring_names_its_leg_but_any_may_come(rooms: Rooms) -> None:
    first, second, third = submit(rooms, SMALL, SMALL, BIG)
    assert take(rooms, Leg.PREFILL, wanted=second) == second
    assert take(rooms, Leg.PREFILL, wanted=second) == first, "somebody has it already"
    submit(rooms, SMALL)
    assert take(rooms, Leg.PREFILL, free_tokens=SMALL + 1, wanted=third) != third, "it does not fit"


def test_a_wanted_leg_does_not_overtake_a_recovered_one(rooms: Rooms) -> None:
    recovered, new = submit(rooms, SMALL, SMALL)
    rooms.release(take_hold(rooms, Leg.PREFILL, "P"), Why.PEER)
    assert take(rooms, Leg.PREFILL, wanted=new) == recovered


def test_what_does_not_fit_is_overtaken_for_a_while(rooms: Rooms) -> None:
    _, small = submit(rooms, BIG, SMALL)
    assert take(rooms, Leg.PREFILL, free_tokens=SMALL) is None, "the next token needs room too"
    assert take(rooms, Leg.PREFILL, free_tokens=SMALL + 1) == small


@pytest.mark.parametrize("leg", [Leg.PREFILL, Leg.DECODE])
@pytest.mark.parametrize("wanted", [True, False])
def test_nobody_starves(rooms: Rooms, leg: Leg, wanted: bool) -> None:
    big, small = submit(rooms, BIG, SMALL)
    if leg is Leg.DECODE:
        assert {take(rooms, Leg.PREFILL), take(rooms, Leg.PREFILL)} == {big, small}
    let_wait(rooms, big, leg, ms=2_100)
    assert take(rooms, leg, free_tokens=SMALL + 1, wanted=small if wanted else None) is None
    assert take(rooms, leg, free_tokens=BIG + 1) == big
    assert take(rooms, leg, free_tokens=SMALL + 1) == small


def test_what_fits_nowhere_here_does_not_block(rooms: Rooms) -> None:
    """Another worker may be larger; this one must not stand still for it."""
    huge, small = submit(rooms, 2_000, SMALL)
    let_wait(rooms, huge, Leg.PREFILL, ms=60_000)
    assert take(rooms, Leg.PREFILL) == small


def test_many_legs_for_larger_workers_hold_up_no_small_one(rooms: Rooms) -> None:
    """As many as a claim looks at, and a worker that none of them is for."""
    submit(rooms, *[ROOMY] * 70)
    (small,) = submit(rooms, SMALL)
    assert take(rooms, Leg.PREFILL) == small
    assert take(rooms, Leg.PREFILL) is None


def test_what_could_outgrow_a_worker_is_left_to_larger_ones(rooms: Rooms) -> None:
    """It would be cut short there, or could not be prefilled again after a crash."""
    outgrowing, fitting = submit(rooms, ROOMY - 15, ROOMY - 16)  # each asks for 16 more tokens
    let_wait(rooms, outgrowing, Leg.PREFILL, ms=60_000)
    assert take(rooms, Leg.PREFILL, free_tokens=ROOMY) == fitting
    assert take(rooms, Leg.BOTH, free_tokens=ROOMY) is None


def test_emitted_tokens_need_room(rooms: Rooms) -> None:
    (request_id,) = submit(rooms, SMALL)
    hold = take_hold(rooms, Leg.BOTH, "U")
    rooms.emit([Emission(hold, 0, tokens(0, 7))])
    rooms.release(hold, Why.DRAIN)
    assert take(rooms, Leg.PREFILL, free_tokens=SMALL + 7) is None
    assert take(rooms, Leg.PREFILL, free_tokens=SMALL + 8) == request_id


def test_a_claim_looks_only_so_far(rooms: Rooms) -> None:
    submit(rooms, *[BIG] * 64)
    (small,) = submit(rooms, SMALL)
    assert take(rooms, Leg.PREFILL, free_tokens=SMALL + 1, wanted=small) is None


def test_who_retracted_takes_no_new_one(rooms: Rooms) -> None:
    retracted, other = submit(rooms, SMALL, SMALL)
    d = decode_alone(rooms, "D1", retracted)
    assert rooms.release(d, Why.RETRACT).ok
    assert take(rooms, Leg.PREFILL, "P", wanted=other) == retracted, "it goes first"
    assert take(rooms, Leg.PREFILL, "P") == other
    assert take(rooms, Leg.DECODE, "D1", wanted=other) == retracted
    assert take(rooms, Leg.DECODE, "D1") == other
    check_integrity(rooms)


def test_who_retracted_waits_until_somebody_takes_it(rooms: Rooms) -> None:
    retracted, other, third = submit(rooms, SMALL, SMALL, SMALL)
    d = decode_alone(rooms, "D1", retracted)
    assert take(rooms, Leg.PREFILL, "P") == other
    assert rooms.release(d, Why.RETRACT).ok
    assert take(rooms, Leg.DECODE, "D1") is None, "its own retracted request waits for prefill"
    assert take(rooms, Leg.DECODE, "D2") == other, "others may"
    assert take(rooms, Leg.PREFILL, "P") == retracted
    assert take(rooms, Leg.DECODE, "D2") == retracted
    assert take(rooms, Leg.PREFILL, "P") == third
    assert take(rooms, Leg.DECODE, "D1") == third


def test_who_retracted_is_free_when_the_request_ends(rooms: Rooms) -> None:
    retracted, other = submit(rooms, SMALL, SMALL)
    d = decode_alone(rooms, "D1", retracted)
    assert rooms.release(d, Why.RETRACT).ok
    assert take(rooms, Leg.PREFILL, "P") == retracted
    assert take(rooms, Leg.PREFILL, "P") == other
    rooms.cancel(retracted)
    assert take(rooms, Leg.DECODE, "D1") == other


def test_a_unified_worker_that_retracted_takes_no_new_one(rooms: Rooms) -> None:
    retracted, other = submit(rooms, BIG, SMALL)
    hold = take_hold(rooms, Leg.BOTH, "U")
    assert rooms.emit([Emission(hold, 0, tokens(0, 1))])
    assert rooms.release(hold, Why.RETRACT).ok
    assert take(rooms, Leg.BOTH, "U", free_tokens=SMALL + 1) is None, "a new one would take its room"
    assert take(rooms, Leg.BOTH, "U", wanted=other) == retracted
    assert take(rooms, Leg.BOTH, "U") == other


def test_the_reaper_rings_again_as_much_as_there_is_room_for(rooms: Rooms) -> None:
    rooms.register(card("P", "prefill", LOAD._replace(slots=2)))
    rooms.register(card("D", "decode", LOAD._replace(slots=5)))
    ids = submit(rooms, *[SMALL] * 4)
    assert rooms.reap(LONG_MS, 3).rings == [], "they have just been rung for"
    for request_id in ids:
        let_wait(rooms, request_id, Leg.PREFILL, ms=3_000)
    assert rooms.reap(LONG_MS, 3).rings == [Ring(Leg.PREFILL, i, SMALL) for i in ids[:2]]
    assert rooms.reap(LONG_MS, 3).rings == [], "the others wait for room"
    rooms.register(card("U", "unified", LOAD._replace(slots=1)))
    assert rooms.reap(LONG_MS, 3).rings == [Ring(Leg.PREFILL, ids[2], SMALL)]
    assert take(rooms, Leg.PREFILL) == ids[0]
    let_wait(rooms, ids[0], Leg.DECODE, ms=3_000)
    assert Ring(Leg.DECODE, ids[0], SMALL) in rooms.reap(LONG_MS, 3).rings


def test_without_workers_nobody_is_rung(rooms: Rooms) -> None:
    (request_id,) = submit(rooms, SMALL)
    let_wait(rooms, request_id, Leg.PREFILL, ms=60_000)
    assert rooms.reap(LONG_MS, 3).rings == []


def test_after_a_gap_the_reaper_waits_one_lease(rooms: Rooms) -> None:
    redis: Any = rooms.redis
    lease_ms = 300

    def reap_until_expired() -> list[str]:
        return until(lambda: rooms.reap(lease_ms, 9).expired, "the lease expires")

    def now_ms() -> Any:
        seconds, microseconds = redis.time()
        return seconds * 1e3 + microseconds / 1e3

    (request_id,) = submit(rooms, SMALL)
    for _ in range(2):  # the first call ever, then after an outage
        claim(rooms, Leg.PREFILL, "P", lease_ms=0)
        first = now_ms()
        assert reap_until_expired() == [request_id]
        assert now_ms() - first >= lease_ms
        redis.hset(f"{rooms.root}:reaper", "last", now_ms() - 10 * lease_ms)

    claim(rooms, Leg.PREFILL, "P", lease_ms=0)
    rooms.reap(lease_ms, 9)
    redis.hset(f"{rooms.root}:reaper", "wait_until", 0)
    assert rooms.reap(lease_ms, 9).expired == [request_id], "without a gap it does not wait"


def test_a_deadline_of_what_is_gone_holds_up_no_other(rooms: Rooms) -> None:
    """As where a server has replayed half of an end, and the record has expired since."""
    (request_id,) = submit(rooms, SMALL)
    redis: Any = rooms.redis
    redis.zadd(f"{rooms.root}:deadline", {"req_gone": 1, request_id: 2})
    assert rooms.reap(LONG_MS, 9).failed == [request_id]
    assert not redis.exists(f"{rooms.root}:deadline")


def test_a_renewed_lease_does_not_expire(rooms: Rooms) -> None:
    submit(rooms, SMALL)
    hold = take_hold(rooms, Leg.PREFILL, "P")
    rooms.renew("P", LOAD, [hold], 0)
    rooms.renew("P", LOAD, [hold], LONG_MS)
    assert rooms.reap(0, 9).expired == []


def test_a_claim_that_never_arrived_is_given_back(rooms: Rooms) -> None:
    """The answer to a claim got lost, so the worker does not list it."""
    first, lost = submit(rooms, SMALL, SMALL)
    hold = take_hold(rooms, Leg.PREFILL, "P")
    assert take(rooms, Leg.PREFILL, "P") == lost
    renewed = rooms.renew("P", LOAD, [hold], LONG_MS)
    assert renewed.rings == [Ring(Leg.PREFILL, lost, SMALL)]
    assert [kept.hold.request_id for kept in renewed.kept] == [first]


def test_workers_show_their_cards(rooms: Rooms) -> None:
    cards = [card(boot, role) for boot, role in (("P", "prefill"), ("D", "decode"))]
    assert not rooms.renew("P", LOAD, [], LONG_MS).known
    for c in cards * 2:
        rooms.register(c)
    assert sorted(rooms.workers()) == sorted(cards)
    busy = LOAD._replace(slots=0, running=4)
    assert rooms.renew("P", busy, [], LONG_MS).known
    assert {c.boot: c.load for c in rooms.workers()} == {"P": busy, "D": LOAD}
    rooms.deregister("P")
    assert [c.boot for c in rooms.workers()] == ["D"]
    assert not rooms.renew("P", busy, [], LONG_MS).known
    redis: Any = rooms.redis
    assert 9_000 < redis.pttl(f"{rooms.root}:worker:D") <= 10_000


def test_what_waits_is_counted(rooms: Rooms) -> None:
    assert rooms.waiting(Leg.BOTH) == (0, False, 0)
    first, *_ = submit(rooms, SMALL, SMALL)
    queued = rooms.waiting(Leg.PREFILL)
    record = rooms.record(first)
    assert record
    assert queued == (2, False, record.timings.submitted)
    d = decode_alone(rooms, "D", first)
    rooms.release(d, Why.RETRACT)
    again = rooms.waiting(Leg.PREFILL)
    assert again[:2] == (2, True)
    assert again.since_ms > queued.since_ms
    assert rooms.waiting(Leg.DECODE) == (0, False, 0)


def test_claims_of_many_threads_never_meet(rooms: Rooms) -> None:
    ids = submit(rooms, *[SMALL] * 40)
    boots = itertools.cycle("ABCD")
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda boot: take(rooms, Leg.PREFILL, boot), itertools.islice(boots, 50)))
    assert sorted(i for i in taken if i) == sorted(ids)
    assert taken.count(None) == 10
    check_integrity(rooms)
