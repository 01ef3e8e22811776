"""Every message of a kind is lost, or comes three times, while 16 requests are open."""

import itertools
from collections.abc import Iterable

import pytest

from tests.chaos.cluster import Cluster
from tests.chaos.faults import TRANSITIONS, Fault, Kind, When
from tests.chaos.load import ANSWERED_S, Prompt, submit
from tests.chaos.watch import Text, Watch, compare, leaks

WORKERS = 2  # of each role
MOST = 100  # more than one worker passes during a test, but for its renewals and emits
MAIL = [name for name in TRANSITIONS if name.startswith("mail.")]
CALLS = ["claim", "claim_forks", "publish", "kv_ready", "emit", "finish", "release", "settle"]


def all_of(names: Iterable[str], kind: Kind, when: When, every: int = 1) -> list[Fault]:
    """This kind of fault at the first, and then every so many-th, passing of a transition by any worker."""
    passings = (
        (role, name, occurrence)
        for name in names
        for role in TRANSITIONS[name][0]
        for occurrence in range(1, MOST, every)
        for _ in range(WORKERS)
    )
    numbers = itertools.count(1)
    return [Fault(next(numbers), role, kind, name, when, occurrence) for role, name, occurrence in passings]


SCENES = {
    "no mail arrives": all_of(MAIL, Kind.DROP, When.BEFORE),
    "all mail comes three times": all_of(MAIL, Kind.DUPLICATE, When.BEFORE),
    "all calls come three times": all_of(CALLS, Kind.DUPLICATE, When.BEFORE),
    "every other call is lost": all_of(CALLS, Kind.DROP, When.BEFORE, every=2),
    "every other reply is lost": all_of(CALLS, Kind.DROP, When.AFTER, every=2),
}


@pytest.mark.parametrize("scene", SCENES)
def test_messages_are_hints_and_calls_may_repeat(
    cluster: Cluster, load: list[Prompt], expected: list[Text], scene: str
) -> None:
    cluster.arm(SCENES[scene])
    ids = submit(cluster, load)
    watch = Watch(cluster, ids)
    ended = watch.all_ended(ANSWERED_S)
    assert len(cluster.happened) > len(ids), "faults were meant to happen"
    assert not watch.problems
    assert not compare([ended[request_id] for request_id in ids], expected)
    records = [cluster.rooms.record(request_id) for request_id in ids]
    assert {record.attempts for record in records if record} == {1}
    assert not leaks(cluster)
