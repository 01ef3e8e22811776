"""Workers are killed, one place after the other, while 16 requests are open."""

import signal

import pytest

from tests.chaos.cluster import Cluster
from tests.chaos.faults import Fault, Kind, When
from tests.chaos.load import ANSWERED_S, Prompt, submit
from tests.chaos.watch import (
    CLAIMED_WITHIN_S,
    FREED_WITHIN_S,
    Text,
    Watch,
    compare,
    leaks,
    orphans,
    recoveries,
)
from tests.integration.until import until

PLACES = {
    "prefill, bootstrapping": ("prefill", "claim", When.AFTER, 3),
    "prefill, computing": ("prefill", "computed", When.BEFORE, 7),
    "prefill, sending": ("prefill", "post", When.AFTER, 3),
    "prefill, sealed but not ready": ("prefill", "kv_ready", When.BEFORE, 2),
    "decode, reserving": ("decode", "claim", When.AFTER, 2),
    "decode, receiving": ("decode", "publish", When.AFTER, 2),
    "decode, before forks are claimed": ("decode", "claim_forks", When.BEFORE, 1),
    "decode, forks claimed": ("decode", "claim_forks", When.AFTER, 1),
    "decode, generating": ("decode", "emit", When.AFTER, 12),
    "decode, before the end is written": ("decode", "finish", When.BEFORE, 1),
    "decode, after the end is written": ("decode", "finish", When.AFTER, 1),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_killed_worker_costs_seconds_and_no_token(
    cluster: Cluster, load: list[Prompt], expected: list[Text], place: str
) -> None:
    role, transition, when, occurrence = PLACES[place]
    fault = Fault(1, role, Kind.KILL, transition, when, occurrence)
    cluster.arm([fault])
    ids = submit(cluster, load)
    watch = Watch(cluster, ids)
    killed = cluster.wait_for(fault)
    owned = orphans(cluster, killed.boot)
    claims = recoveries(cluster, owned, killed.at)
    ended = watch.all_ended(ANSWERED_S)

    for claim in sorted(claims, key=lambda each: each.freed_s):
        print(f"{place}: {claim.leg} queued after {claim.freed_s:.2f} s, claimed {claim.waited_s:.2f} later")
    assert not watch.problems
    assert not compare([ended[request_id] for request_id in ids], expected)
    assert not [claim for claim in claims if claim.freed_s > FREED_WITHIN_S]
    assert not [claim for claim in claims if claim.seconds > CLAIMED_WITHIN_S]
    assert not leaks(cluster)


def test_a_machine_that_fails_as_a_whole_goes_on_where_it_was(
    cluster: Cluster, load: list[Prompt], expected: list[Text]
) -> None:
    """Every worker and Redis are killed at once; a supervisor starts them again."""
    cluster.disarm()
    ids = submit(cluster, load)
    watch = Watch(cluster, ids)
    until(lambda: watch.emitted() > len(ids), "tokens flow", ANSWERED_S)
    for worker in cluster.workers:
        worker.send(signal.SIGKILL)
    cluster.server.restart()
    ended = watch.all_ended(ANSWERED_S)
    assert not watch.problems
    assert not compare([ended[request_id] for request_id in ids], expected)
    cluster.ready()
    assert not leaks(cluster)
