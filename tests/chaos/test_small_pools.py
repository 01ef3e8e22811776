"""One worker of each role, with pools that do not hold everything."""

import time
from collections.abc import Iterator

import pytest

from relay.request import State
from tests.chaos.cluster import Cluster, Happened
from tests.chaos.faults import Fault, Kind, When
from tests.chaos.load import ANSWERED_S, Prompt, greedy, prompts, submit, undisturbed
from tests.chaos.watch import Watch, compare, leaks, orphans, recoveries
from tests.integration.until import until

POOL_TOKENS = 768
LONG_TOKENS = 72
FREED_WITHIN_S = 1.0

PLACES = {
    "bootstrapping": ("prefill", "claim", When.AFTER, 1),
    "reserving": ("decode", "claim", When.AFTER, 1),
    "published": ("decode", "publish", When.AFTER, 1),
    "computing": ("prefill", "computed", When.AFTER, 4),
    "sending": ("prefill", "post", When.AFTER, 2),
    "sealing": ("prefill", "post.row", When.BEFORE, 1),
    "ready": ("prefill", "kv_ready", When.AFTER, 1),
    "generating": ("decode", "emit", When.AFTER, 5),
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    small = {"KV_POOL_TOKENS": str(POOL_TOKENS), "RESERVE_TOKENS": "16", "CHUNK_TOKENS": "64"}
    with Cluster(tmp_path_factory.mktemp("small"), prefill=1, decode=1, **small) as running:
        yield running


@pytest.fixture(scope="module")
def long_prompt() -> Prompt:
    """A prompt of half the pool."""
    return sum(prompts(seed=5), ())[: POOL_TOKENS // 2]


def test_a_retracted_request_ends_with_the_same_text(cluster: Cluster) -> None:
    load = sorted(prompts(seed=6), key=len)[4:10]
    apart = undisturbed(cluster, load[:3], LONG_TOKENS) + undisturbed(cluster, load[3:], LONG_TOKENS)
    ids = submit(cluster, load, LONG_TOKENS)
    watch = Watch(cluster, ids)
    ended = watch.all_ended(ANSWERED_S)
    records = [cluster.rooms.record(request_id) for request_id in ids]
    assert sum(record.retractions for record in records if record) > 0
    assert [record.attempts for record in records if record] == [1] * len(ids)
    assert not watch.problems
    assert not compare([ended[request_id] for request_id in ids], apart)
    assert not leaks(cluster)


@pytest.mark.parametrize(("role", "transition"), [("prefill", "computed"), ("decode", "emit")])
def test_the_only_worker_of_a_pool_is_killed_and_restarted(
    cluster: Cluster, role: str, transition: str
) -> None:
    """How soon its legs are claimed again depends on how fast a worker starts here."""
    load = prompts(seed=7, count=6)
    expected = undisturbed(cluster, load)
    fault = Fault(1, role, Kind.KILL, transition, When.AFTER, 4)
    cluster.arm([fault])
    ids = submit(cluster, load)
    watch = Watch(cluster, ids)
    killed = cluster.wait_for(fault)
    claims = recoveries(cluster, orphans(cluster, killed.boot), killed.at, ANSWERED_S)
    ended = watch.all_ended(ANSWERED_S)
    seconds = sorted(round(claim.seconds, 2) for claim in claims)
    print(f"only {role} worker: claimed again after {seconds} s")
    assert not watch.problems
    assert not compare([ended[request_id] for request_id in ids], expected)
    cluster.ready()
    assert not leaks(cluster)


def held_pages(cluster: Cluster) -> int:
    """What requests hold of all pools, asked of the workers themselves."""
    stats = cluster.engine_stats()
    if len(stats) < len(cluster.workers):
        return -1
    return sum(engine["held_pages"] + engine["quarantined_pages"] for engine in stats)


@pytest.mark.parametrize("place", PLACES)
def test_a_cancel_frees_everything_within_a_second(cluster: Cluster, long_prompt: Prompt, place: str) -> None:
    role, transition, when, occurrence = PLACES[place]
    # A delay of nothing: only a mark that the request is there.
    number = 1 + list(PLACES).index(place)
    mark = Fault(number, role, Kind.DELAY, transition, when, occurrence)
    cluster.arm([mark])
    # A salt of its own: nothing of an earlier prompt is cached.
    prompt = (number, *long_prompt[1:])
    (request_id,) = cluster.submit(prompt, greedy(LONG_TOKENS))
    seen: Happened = cluster.wait_for(mark)
    record = cluster.rooms.cancel(request_id).record
    cancelled = time.monotonic()
    assert record is not None
    assert record.state is State.CANCELLED, f"too late, marked at {seen.at}"
    until(lambda: held_pages(cluster) == 0, "all pages are free", ANSWERED_S)
    seconds = time.monotonic() - cancelled
    print(f"cancelled while {place}: all pages are free after {seconds:.2f} s")
    assert seconds < FREED_WITHIN_S
    assert not leaks(cluster)


def test_a_cancel_in_the_queue_leaves_nothing(cluster: Cluster, long_prompt: Prompt) -> None:
    cluster.disarm()
    ids = [
        request_id
        for i in range(6)
        for request_id in cluster.submit((100 + i, *long_prompt[1:]), greedy(LONG_TOKENS))
    ]
    last = cluster.rooms.record(ids[-1])
    assert last is not None
    assert last.state is State.QUEUED
    for request_id in reversed(ids):
        cluster.rooms.cancel(request_id)
    cancelled = time.monotonic()
    until(lambda: held_pages(cluster) == 0, "all pages are free", ANSWERED_S)
    assert time.monotonic() - cancelled < FREED_WITHIN_S
    assert not leaks(cluster)
