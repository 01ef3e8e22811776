"""A schedule of faults, wave by wave: 16 requests are open while a few faults may happen, and a few more that
are cancelled."""

import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from relay.request import State
from tests.chaos.cluster import Cluster
from tests.chaos.faults import Fault
from tests.chaos.load import ANSWERED_S, Prompt, submit
from tests.chaos.watch import Text, Watch, compare, leaks

WAVE = 4
CANCELLED = 3
FORGOTTEN_SHARE = 0.5  # of the waves: in the others decode workers have much of each prompt
LATEST_CANCEL_S = 4.0


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
    draw = random.Random(wave[0].number)
    if draw.random() < FORGOTTEN_SHARE:
        cluster.forget()
    ids, dropped = submit(cluster, load), submit(cluster, load[:CANCELLED])
    watch = Watch(cluster, ids + dropped)
    timers = [_cancel_later(cluster, request_id, draw) for request_id in dropped]
    problems = []
    try:
        ended = watch.all_ended(ANSWERED_S)
        problems += compare([ended[request_id] for request_id in ids], expected)
        problems += cut_short([ended[request_id] for request_id in dropped], expected)
    except AssertionError as error:
        problems.append(str(error))
    for timer in timers:
        timer.join()
    happened = cluster.happened
    cluster.disarm()
    cluster.resume_all()
    problems += watch.problems
    problems += _settle(cluster)
    for each in sorted(happened.values(), key=lambda each: each.at):
        say(f"  {each.fault} → {each.boot or 'a worker'}, pid {each.pid}")
    missed = [fault for fault in wave if fault.number not in happened]
    for fault in missed:
        say(f"  {fault} → nobody came by")
    for problem in problems:
        say(f"  PROBLEM {problem}")
    return Wave(len(happened), len(missed), problems)


def _cancel_later(cluster: Cluster, request_id: str, draw: random.Random) -> threading.Timer:
    timer = threading.Timer(draw.uniform(0.0, LATEST_CANCEL_S), cluster.rooms.cancel, (request_id,))
    timer.start()
    return timer


def cut_short(found: Sequence[Text], expected: Sequence[Text]) -> list[str]:
    """What is wrong with the texts of requests that were cancelled at some time."""
    return [
        f"cancelled request {i}: {got.state} {got.token_ids} is not how {want.token_ids} begins"
        for i, (got, want) in enumerate(zip(found, expected))
        if got != want
        and (got.state is not State.CANCELLED or got.token_ids != want.token_ids[: len(got.token_ids)])
    ]


def _settle(cluster: Cluster) -> list[str]:
    """Wait until every worker is back, and look for what has leaked."""
    try:
        cluster.ready()
        return leaks(cluster)
    except AssertionError as error:
        return [str(error)]
