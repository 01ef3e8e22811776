"""A schedule of faults, wave by wave: 16 requests are open while a few faults may happen."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tests.chaos.cluster import Cluster
from tests.chaos.faults import Fault
from tests.chaos.load import ANSWERED_S, Prompt, submit
from tests.chaos.watch import Text, Watch, compare, leaks

WAVE = 4


class Wave(NamedTuple):
    """`problems` is empty when all that must hold held."""

    happened: int
    missed: int
    problems: list[str]


def waves(
    cluster: Cluster,
    load: Sequence[Prompt],
    expected: Sequence[Text],
    faults: Sequence[Fault],
    say: Callable[[str], None] = print,
) -> Iterator[Wave]:
    """Run them one after the other; `expected` are the undisturbed texts of `load`."""
    rest = iter(faults)
    while wave := list(itertools.islice(rest, WAVE)):
        yield _run(cluster, load, expected, wave, say)


def _run(
    cluster: Cluster,
    load: Sequence[Prompt],
    expected: Sequence[Text],
    wave: Sequence[Fault],
    say: Callable[[str], None],
) -> Wave:
    cluster.arm(wave)
    ids = submit(cluster, load)
    watch = Watch(cluster, ids)
    problems = []
    try:
        ended = watch.all_ended(ANSWERED_S)
        problems += compare([ended[request_id] for request_id in ids], expected)
    except AssertionError as error:
        problems.append(str(error))
    happened = cluster.happened
    cluster.disarm()
    cluster.resume_all()
    problems += watch.problems
    problems += _settle(cluster)
    for each in happened.values():
        say(f"  {each.fault} → {each.boot or 'a worker'}, pid {each.pid}")
    missed = [fault for fault in wave if fault.number not in happened]
    for fault in missed:
        say(f"  {fault} → nobody came by")
    for problem in problems:
        say(f"  PROBLEM {problem}")
    return Wave(len(happened), len(missed), problems)


def _settle(cluster: Cluster) -> list[str]:
    """Wait until every worker is back, and look for what has leaked."""
    try:
        cluster.ready()
        return leaks(cluster)
    except AssertionError as error:
        return [str(error)]
