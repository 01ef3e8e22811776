"""Samples of one prompt: what becomes of forks, wherever their leader is and whatever happens to it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from relay.answers import Emission, EmitOutcome, SubmitOutcome
from relay.request import Claimed, Finish, Hold, Leg, Ring, State, Why
from relay.rooms import Rooms
from tests.integration.scene import (
    LOAD,
    LONG_MS,
    PREFILLED,
    ROOMY,
    Scene,
    check_integrity,
    claim,
    group,
    nonce,
    submission,
    tokens,
)
from tests.integration.test_rooms import EVENTS, PLACES, TABLE
from tests.integration.until import until
from tests.servers import RedisServer

SHARING = ("ready", "decode", "unified")  # the leader's KV is, or will be, in the pool of who decodes it
OPEN = [place for place in PLACES if place not in ("finished", "failed", "cancelled")]
OWNER = {"unified": "U"}


@pytest.fixture
def scene(rooms: Rooms, server: RedisServer, model: str) -> Scene:
    return Scene(rooms, server, model, forks=2)


@pytest.fixture
def other(rooms: Rooms, server: RedisServer, model: str) -> Scene:
    """A request without forks."""
    return Scene(rooms, server, model)


def fork_ids(s: Scene) -> list[str]:
    return [f"{s.id}-1", f"{s.id}-2"]


def fields(s: Scene, request_id: str) -> dict[str, str]:
    redis: Any = s.rooms.redis
    found = redis.hgetall(f"{s.rooms.root}:req:{request_id}")
    return {name.decode(): value.decode() for name, value in found.items()}


def waiting(s: Scene) -> list[str]:
    """Forks that wait for their leader."""
    redis: Any = s.rooms.redis
    return [i.decode() for i in redis.lrange(f"{s.rooms.root}:forks:{s.id}", 0, -1)]


def queued(s: Scene) -> list[str]:
    """What stands in the queue of the prefill leg, the leader apart."""
    redis: Any = s.rooms.redis
    ids = [i.decode() for i in redis.zrange(f"{s.rooms.root}:queue:prefill", 0, -1)]
    return [i for i in ids if i != s.id]


def claim_forks(s: Scene, place: str, nonces: Sequence[str], lease_ms: int = LONG_MS) -> list[Claimed]:
    return s.rooms.claim_forks(s.d, OWNER.get(place, "D"), lease_ms, nonces).claimed


def states(s: Scene) -> list[str]:
    return [fields(s, fork)["state"] for fork in fork_ids(s)]


@pytest.mark.parametrize("place", OPEN)
@pytest.mark.parametrize("event", EVENTS)
def test_forks_wait_until_their_leader_cannot_share(scene: Scene, event: str, place: str) -> None:
    """Nobody is left behind: a leader that ends or goes back to its queue sets them free in the same step."""
    scene.reach(place)
    assert waiting(scene) == fork_ids(scene)
    assert queued(scene) == []
    check_integrity(scene.rooms)

    _, rings = EVENTS[event](scene)

    check_integrity(scene.rooms)
    cell = TABLE[event].get(place)
    if event == "deadline":  # theirs is the same
        assert (states(scene), waiting(scene), rings) == (["failed", "failed"], [], [])
        return
    assert states(scene) == ["queued", "queued"]
    if cell is None or not (State(cell.state).terminal or cell.state == "queued"):
        assert waiting(scene) == fork_ids(scene)
        assert queued(scene) == []
        assert not [ring for ring in rings if ring.request_id != scene.id]
        return
    assert waiting(scene) == []
    assert queued(scene) == fork_ids(scene)
    if event != "finish":  # whose caller is told otherwise
        assert rings[-2:] == [Ring(Leg.PREFILL, fork, 3) for fork in fork_ids(scene)]


@pytest.mark.parametrize("leg", [Leg.PREFILL, Leg.DECODE])
def test_a_claim_that_finds_a_leader_too_late_ends_its_forks_too(scene: Scene, leg: Leg) -> None:
    scene.reach("queued" if leg is Leg.PREFILL else "open")
    scene.let_deadlines_pass()
    assert claim(scene.rooms, leg, "D") is None
    all_ids = (scene.id, *fork_ids(scene))
    assert [fields(scene, request_id)["error_code"] for request_id in all_ids] == ["timeout"] * 3
    assert (waiting(scene), queued(scene)) == ([], [])
    check_integrity(scene.rooms)


def test_whose_leader_finishes_is_rung_for(scene: Scene, other: Scene) -> None:
    scene.reach("decode")
    (emitted,) = scene.rooms.emit([scene.emission(2, 1, Finish("length"))])
    assert emitted.outcome is EmitOutcome.DONE
    assert emitted.rings == tuple(Ring(Leg.PREFILL, fork, 3) for fork in fork_ids(scene))
    other.reach("decode")
    both = scene.rooms.emit([scene.emission(3, 0, Finish("length")), other.emission(2, 1, Finish("length"))])
    assert [e.rings for e in both] == [(), ()], "a repeat, and one that leads nobody"


@pytest.mark.parametrize("place", SHARING)
@pytest.mark.parametrize("room", [0, 1, 2, 5])
def test_forks_are_claimed_where_the_leader_is(scene: Scene, place: str, room: int) -> None:
    scene.reach(place)
    nonces = [nonce() for _ in range(room)]
    forked = scene.rooms.claim_forks(scene.d, OWNER.get(place, "D"), LONG_MS, nonces)
    taken = min(room, 2)
    assert [c.hold.request_id for c in forked.claimed] == fork_ids(scene)[:taken]
    assert [c.hold.nonce for c in forked.claimed] == nonces[:taken]
    assert {(c.hold.leg, c.room, c.prompt_ids, c.emitted) for c in forked.claimed} <= {
        (Leg.BOTH, 0, (1, 2, 3), ())
    }
    assert states(scene) == ["decode"] * taken + ["queued"] * (2 - taken)
    assert waiting(scene) == []
    assert queued(scene) == fork_ids(scene)[taken:]
    assert forked.rings == [Ring(Leg.PREFILL, fork, 3) for fork in fork_ids(scene)[taken:]]
    check_integrity(scene.rooms)

    again = scene.rooms.claim_forks(scene.d, OWNER.get(place, "D"), LONG_MS, nonces)
    assert again.claimed == forked.claimed, "its answer may have been lost"
    check_integrity(scene.rooms)


@pytest.mark.parametrize("place", [place for place in PLACES if place not in SHARING])
def test_no_forks_without_the_leaders_kv(scene: Scene, place: str) -> None:
    scene.reach(place)
    before = waiting(scene), queued(scene)
    assert scene.rooms.claim_forks(scene.d, "D", LONG_MS, [nonce(), nonce()]) == ([], [])
    assert (waiting(scene), queued(scene)) == before
    check_integrity(scene.rooms)


@pytest.mark.parametrize("wrong", ["fence", "nonce"])
def test_another_claim_on_the_leader_gets_no_forks(scene: Scene, wrong: str) -> None:
    scene.reach("decode")
    change: dict[str, Callable[[Hold], Hold]] = {
        "fence": lambda h: h._replace(fence=h.fence - 1),
        "nonce": lambda h: h._replace(nonce="other"),
    }
    assert scene.rooms.claim_forks(change[wrong](scene.d), "D", LONG_MS, [nonce()]) == ([], [])
    assert waiting(scene) == fork_ids(scene)


def test_who_has_retracted_gets_no_forks(scene: Scene, other: Scene) -> None:
    """It has no room for new ones before what it retracted is back."""
    other.reach("decode")
    scene.reach("decode")
    assert other.release(Leg.DECODE, Why.RETRACT)
    assert claim_forks(scene, "decode", [nonce(), nonce()]) == []
    assert set(queued(scene)) == {other.id, *fork_ids(scene)}


@pytest.mark.parametrize("place", SHARING)
def test_a_claimed_fork_is_as_any_request_of_a_unified_worker(scene: Scene, other: Scene, place: str) -> None:
    scene.reach(place)
    first, second = claim_forks(scene, place, [nonce(), nonce()])
    boot = OWNER.get(place, "D")
    other.reach("unified")
    of_queue = {"p_queued", "p_rung"}
    assert fields(scene, first.hold.request_id).keys() == fields(scene, other.id).keys() - of_queue

    assert scene.rooms.cancel(scene.id).record, "its leader is of no concern to it any more"
    emission = Emission(first.hold, 0, tokens(0, 2), Finish("length"), PREFILLED)
    assert scene.rooms.emit([emission])[0].outcome is EmitOutcome.DONE
    record = scene.rooms.record(first.hold.request_id)
    assert record
    assert (record.state, record.completion_tokens, record.cached_tokens) == (State.FINISHED, 2, 2)

    renewed = scene.rooms.renew(boot, LOAD, [second.hold, other.d], 0)
    assert second.hold in [kept.hold for kept in renewed.kept]
    reaped = scene.rooms.reap(0, 9)
    assert second.hold.request_id in reaped.expired
    assert Ring(Leg.PREFILL, second.hold.request_id, 3) in reaped.rings
    assert second.hold.request_id in queued(scene)
    check_integrity(scene.rooms)


@pytest.mark.parametrize("leg", [Leg.PREFILL, Leg.BOTH])
def test_a_waiting_fork_is_not_claimed_from_a_queue(scene: Scene, leg: Leg) -> None:
    scene.reach("queued")
    got = claim(scene.rooms, leg, "W", wanted=fork_ids(scene)[0])
    assert got
    assert got.claimed.hold.request_id == scene.id
    assert claim(scene.rooms, leg, "W") is None
    assert scene.rooms.reap(LONG_MS, 9, ring_after_ms=-1).rings == [], "nobody is rung for it"


@pytest.mark.parametrize("place", ["queued", "open", "published", *SHARING])
def test_a_waiting_fork_is_cancelled_alone(scene: Scene, place: str) -> None:
    scene.reach(place)
    first, second = fork_ids(scene)
    record = scene.rooms.cancel(first).record
    assert record
    assert record.state is State.CANCELLED
    assert scene.rooms.cancel(first) == (record, [])
    assert waiting(scene) == [second]
    check_integrity(scene.rooms)
    if place in SHARING:
        (got,) = claim_forks(scene, place, [nonce(), nonce()])
        assert got.hold.request_id == second


def test_a_group_is_cancelled_in_one_step(scene: Scene) -> None:
    scene.reach("decode")
    record, rings = scene.rooms.cancel(scene.id, *fork_ids(scene))
    assert rings == []
    assert record
    assert record.request_id == scene.id
    assert states(scene) == ["cancelled", "cancelled"]
    assert queued(scene) == []
    redis: Any = scene.rooms.redis
    assert redis.hget(f"{scene.rooms.root}:req:{fork_ids(scene)[0]}", "p_queued") is None, "never set free"
    check_integrity(scene.rooms)


def test_who_decodes_learns_how_many_forks_wait(scene: Scene) -> None:
    scene.reach("open")
    got = claim(scene.rooms, Leg.DECODE, "D")
    assert got
    assert got.claimed.forks == 2


def test_a_worker_that_shares_nothing_keeps_forks_for_two_seconds(scene: Scene) -> None:
    """Its call to claim them may have been refused for good; its leases go on."""
    scene.reach("decode")
    assert scene.rooms.renew("D", LOAD, [scene.d], LONG_MS).rings == []
    assert waiting(scene) == fork_ids(scene)
    redis: Any = scene.rooms.redis
    name = f"{scene.rooms.root}:req:{scene.id}"
    redis.hset(name, "first_token", str(float(redis.hget(name, "first_token")) - 2_500))
    rings = scene.rooms.renew("D", LOAD, [scene.d], LONG_MS).rings
    assert rings == [Ring(Leg.PREFILL, fork, 3) for fork in fork_ids(scene)]
    check_integrity(scene.rooms)


def test_a_group_is_accepted_whole_or_not_at_all(rooms: Rooms) -> None:
    rooms.submit(submission("req_first", tokens=10))
    redis: Any = rooms.redis
    one = int(redis.hget(f"{rooms.root}:totals", "open_bytes"))
    limits: list[dict[str, int]] = [{"max_open_requests": 3}, {"max_open_bytes": 3 * one}]
    for limit in limits:
        refused = rooms.submit(*group("req_a", forks=2, tokens=10, **limit))
        assert refused[:3] == (SubmitOutcome.FULL, "req_a", [])
        assert [r.request_id for r in rooms.list_requests(9)] == ["req_first"]
        check_integrity(rooms)
    assert rooms.submit(*group("req_a", forks=2, max_open_requests=4)).outcome is SubmitOutcome.NEW
    assert rooms.submit(submission(max_open_requests=4)).outcome is SubmitOutcome.FULL


def test_a_group_may_hold_several_prompts(rooms: Rooms) -> None:
    one, two = group("req_a", forks=1), submission("req_a-2", tokens=5)
    assert rooms.submit(*one, two).rings == [Ring(Leg.PREFILL, "req_a", 3), Ring(Leg.PREFILL, "req_a-2", 5)]
    got = [claim(rooms, Leg.BOTH, "U", wanted=i) for i in ("req_a", "req_a-2")]
    assert [c and c.claimed.prompt_ids for c in got] == [(1, 2, 3), (1, 2, 3, 4, 5)]
    assert [c and c.claimed.forks for c in got] == [1, 0]
    check_integrity(rooms)


def test_a_group_that_is_submitted_twice_is_one(rooms: Rooms) -> None:
    members = [*group("req_a", forks=1), submission("req_a-2")]
    assert rooms.submit(*members) == rooms.submit(*members)
    assert len(rooms.list_requests(9)) == 3
    check_integrity(rooms)


def test_an_idempotency_key_names_a_group(rooms: Rooms) -> None:
    rooms.submit(*group("req_a", forks=2, idempotency_key="k", body_hash="h"), submission("req_a-3"))
    twin = [*group("req_b", forks=2, idempotency_key="k", body_hash="h"), submission("req_b-3")]
    again = rooms.submit(*twin)
    assert again[:2] == (SubmitOutcome.DUPLICATE, "req_a")
    assert again.rings == [Ring(Leg.PREFILL, "req_a", 3), Ring(Leg.PREFILL, "req_a-3", 3)]
    assert rooms.submit(*group("req_c", idempotency_key="k", body_hash="x")).outcome is SubmitOutcome.CONFLICT
    assert len(rooms.list_requests(9)) == 4
    check_integrity(rooms)


@pytest.mark.parametrize("place", [None, "decode"])
def test_forks_survive_the_server(server_binary: Any, tmp_path: Any, model: str, place: str | None) -> None:
    """What waited waits, and what was claimed comes back when its owner does not."""
    with RedisServer(server_binary, tmp_path, append_fsync="always") as server:
        rooms = Rooms(server.url, model)
        scene = Scene(rooms, server, model, forks=2)
        scene.reach("decode")
        if place:
            assert len(claim_forks(scene, "decode", [nonce(), nonce()], lease_ms=1)) == 2
        server.kill()
        server.start()
        check_integrity(rooms)
        if place:
            until(lambda: rooms.reap(0, 9) and len(queued(scene)) == 2, "their leases end")
        else:
            assert waiting(scene) == fork_ids(scene)
            assert len(claim_forks(scene, "decode", [nonce(), nonce()])) == 2
        check_integrity(rooms)
        rooms.close()


def test_a_fork_that_fits_nowhere_here_waits_in_the_queue(scene: Scene) -> None:
    """Freed, it is claimed by whoever has room, like any other."""
    scene.reach("decode")
    claim_forks(scene, "decode", [])
    assert claim(scene.rooms, Leg.PREFILL, "P", free_tokens=2) is None
    got = claim(scene.rooms, Leg.PREFILL, "P", free_tokens=ROOMY)
    assert got
    assert got.claimed.hold.request_id in fork_ids(scene)
