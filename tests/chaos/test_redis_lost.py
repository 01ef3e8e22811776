"""Redis is killed, set back, and robbed of its doorbells, while 16 requests are open."""

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.chaos.cluster import Cluster
from tests.chaos.faults import Fault, Kind, When
from tests.chaos.load import ANSWERED_S, MAX_TOKENS, OPEN, Prompt, submit
from tests.chaos.watch import Text, Watch, compare, leaks
from tests.integration.until import until

PREFILL_WORKERS = 2
LEASE_S = 3


def decode_bells(kind: Kind) -> list[Fault]:
    """This happens to every doorbell that a prefill worker rings."""
    occurrences = [*range(1, OPEN + 1)] * PREFILL_WORKERS
    return [
        Fault(number, "prefill", kind, "ring.decode", When.BEFORE, occurrence)
        for number, occurrence in enumerate(occurrences)
    ]


def pids(cluster: Cluster) -> list[int]:
    return [worker.pid for worker in cluster.workers]


def half_way(watch: Watch) -> None:
    until(lambda: watch.emitted() > OPEN * MAX_TOKENS // 3, "a third of all tokens is out", ANSWERED_S)


def attempts(cluster: Cluster, ids: list[str]) -> set[int]:
    records = [cluster.rooms.record(request_id) for request_id in ids]
    return {record.attempts for record in records if record}


def killed(cluster: Cluster) -> None:
    cluster.server.restart()


def killed_with_everything_on_disk(cluster: Cluster) -> None:
    with cluster.server.client() as client:
        client.config_set("appendfsync", "always")
    cluster.server.restart()


def away_for_longer_than_a_lease(cluster: Cluster) -> None:
    cluster.server.kill()
    time.sleep(LEASE_S + 1)
    cluster.server.start()


def hanging_for_longer_than_a_lease(cluster: Cluster) -> None:
    os.kill(cluster.server.process_id, signal.SIGSTOP)
    time.sleep(LEASE_S + 1)
    os.kill(cluster.server.process_id, signal.SIGCONT)


@pytest.mark.parametrize(
    "outage",
    [
        killed,
        killed_with_everything_on_disk,
        away_for_longer_than_a_lease,
        hanging_for_longer_than_a_lease,
    ],
)
def test_an_outage_costs_no_token_and_no_attempt(
    cluster: Cluster, load: list[Prompt], expected: list[Text], outage: Callable[[Cluster], None]
) -> None:
    before = pids(cluster)
    ids = submit(cluster, load)
    watch = Watch(cluster, ids)
    half_way(watch)
    outage(cluster)
    ended = watch.all_ended(ANSWERED_S)

    assert not watch.problems
    assert not compare([ended[request_id] for request_id in ids], expected)
    assert not leaks(cluster)
    assert pids(cluster) == before
    assert attempts(cluster, ids) == {1}


def test_a_redis_that_lost_its_last_moments_gets_them_again(
    cluster: Cluster, load: list[Prompt], expected: list[Text]
) -> None:
    before = pids(cluster)
    ids = submit(cluster, load)
    watch = Watch(cluster, ids)
    half_way(watch)
    snapshot = cluster.server.snapshot()
    seen = watch.emitted()
    until(lambda: watch.emitted() >= seen + 2 * OPEN or len(watch.ended) == OPEN, "more tokens are out")
    cluster.server.roll_back(snapshot)
    watch.all_ended(ANSWERED_S)

    # What had ended may be open again: it ends once more, in the same way.
    again = Watch(cluster, ids)
    ended = again.all_ended(ANSWERED_S)
    assert not watch.problems + again.problems
    assert not compare([ended[request_id] for request_id in ids], expected)
    assert not leaks(cluster)
    assert pids(cluster) == before


def test_requests_that_redis_forgot_leave_nothing(
    cluster: Cluster, load: list[Prompt], expected: list[Text]
) -> None:
    """Everything is gone, also the workers' cards and the functions."""
    before = pids(cluster)
    watch = Watch(cluster, submit(cluster, load))
    half_way(watch)
    watch.close()
    cluster.rooms.redis.flushall()
    until(lambda: len(cluster.cards()) == len(before), "all workers are registered again")
    assert not leaks(cluster)

    ids = submit(cluster, load)
    ended = Watch(cluster, ids).all_ended(ANSWERED_S)
    assert not compare([ended[request_id] for request_id in ids], expected)
    assert pids(cluster) == before


def test_lost_doorbells_are_rung_again(cluster: Cluster, load: list[Prompt], expected: list[Text]) -> None:
    """None of those that clients and prefill workers ring arrives, and the broker forgets all it knows."""
    cluster.ready()
    cluster.arm(decode_bells(Kind.DROP))
    ids = submit(cluster, load, rings=0)
    watch = Watch(cluster, ids)
    with cluster.app.connection_for_write() as connection:
        connection.default_channel.client.flushdb()
    ended = watch.all_ended(ANSWERED_S)
    assert not watch.problems
    assert not compare([ended[request_id] for request_id in ids], expected)
    assert not leaks(cluster)


def test_every_doorbell_three_times_runs_nothing_twice(
    cluster: Cluster, load: list[Prompt], expected: list[Text]
) -> None:
    cluster.arm(decode_bells(Kind.DUPLICATE))
    ids = submit(cluster, load, rings=3)
    watch = Watch(cluster, ids)
    ended = watch.all_ended(ANSWERED_S)
    assert not watch.problems
    assert not compare([ended[request_id] for request_id in ids], expected)
    assert [claims(cluster, i) for i in ids] == [legs(cluster, i) for i in ids], "one per leg"
    assert not leaks(cluster)


def claims(cluster: Cluster, request_id: str) -> int:
    """How often a leg of a request was claimed: the fence counts."""
    return int(cluster.rooms.redis.hget(f"{cluster.rooms.root}:req:{request_id}", "fence") or 0)


def legs(cluster: Cluster, request_id: str) -> int:
    """A fork that began where its prompt's KV was has one."""
    record = cluster.rooms.record(request_id)
    assert record
    return 2 if record.timings.ready else 1
