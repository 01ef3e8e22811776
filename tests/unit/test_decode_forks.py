"""Other samples of a prompt: those that begin beside their leader, and those that are sent away."""

from collections.abc import Callable

import pytest
from redis.exceptions import ResponseError

from relay.answers import Forked
from relay.request import Claimed, Leg, Ring
from relay.sampling import SamplingParams
from tests.decode_rig import (
    ENDS,
    FIRST,
    Worker,
)
from tests.desk import claimed
from workers.decode import DecodeLegs, UnifiedLegs
from workers.engine.messages import (
    Prebuilt,
    Prefill,
    Prefilled,
)
from workers.output import Finished, Open


def forks(worker: Worker, *numbers: int, rings: tuple[Ring, ...] = ()) -> list[Claimed]:
    """What the server will grant."""
    granted = [claimed(Leg.BOTH, number) for number in numbers]
    worker.server.replies["claim_forks"] = Forked(granted, list(rings))
    return granted


def arrive(worker: Worker, leg: Claimed) -> None:
    """The KV of the prompt comes into the pool, in the way of this role."""
    if worker.legs.takes is Leg.BOTH:
        worker.legs.on_engine(Prefilled(leg.hold.nonce, FIRST))
    else:
        worker.publish(leg)
        worker.run(leg)
    worker.flush()


@pytest.mark.parametrize("kind", [DecodeLegs, UnifiedLegs])
def test_forks_begin_once_the_kv_of_their_prompt_is_here(kind: type[DecodeLegs]) -> None:
    worker = Worker(kind)
    leg, task = worker.start(forks=2)
    granted = forks(worker, 11, 12)
    worker.flush()
    assert "claim_forks" not in worker.server.names()

    arrive(worker, leg)
    hold, boot, lease_ms, nonces = worker.server.args("claim_forks")
    assert (hold, boot, lease_ms) == (leg.hold, "here", worker.desk.settings.lease_ms)
    assert len(set(nonces)) == 2
    *_, first, second = worker.desk.told
    for fork, prefill in zip(granted, (first, second)):
        assert isinstance(prefill, Prefill)
        assert (prefill.work.key, prefill.relay) == (fork.hold.nonce, False)
        assert worker.output.count(Open, fork.hold.nonce) == 1
    assert kind is UnifiedLegs or isinstance(worker.desk.told[-3], Prebuilt), "its pages are shared by then"
    assert worker.legs.holds() == [leg.hold, *(fork.hold for fork in granted)]
    assert [beside.request_id for beside in task.beside] == ["req_11", "req_12"]
    assert [worker.legs.request_of(beside) for beside in task.beside] == ["req_11", "req_12"]

    for fork in granted:
        worker.legs.on_engine(Prefilled(fork.hold.nonce, FIRST))
    worker.flush()
    assert worker.server.names().count("claim_forks") == 1, "forks have none"
    for number, each in enumerate([leg, *granted]):
        worker.legs.on_outcome(Finished(each.hold.nonce, "stop"))
        assert len(worker.legs.holds()) == 2 - number
    assert [beside.ends for beside in task.beside] == [["ok: stop"], ["ok: stop"]]
    worker.assert_gone(leg)


@pytest.mark.parametrize("kind", [DecodeLegs, UnifiedLegs])
@pytest.mark.parametrize(("room_tokens", "nonces"), [(0, 0), (31, 0), (32, 1), (64, 2), (10_000, 3)])
def test_no_more_forks_than_there_is_room_for(kind: type[DecodeLegs], room_tokens: int, nonces: int) -> None:
    """20 tokens of prompt fill one page of 16 that is shared; a fork needs two more to grow into."""
    worker = Worker(kind, page_size=16, reserve_tokens=16)
    worker.desk.room_tokens = room_tokens
    leg, _ = worker.start(forks=3, params=SamplingParams(max_tokens=1000))
    arrive(worker, leg)
    assert len(worker.server.args("claim_forks")[3]) == nonces, "the server sends the others to their queue"


@pytest.mark.parametrize("kind", [DecodeLegs, UnifiedLegs])
def test_a_request_that_leads_nobody_asks_nobody(kind: type[DecodeLegs]) -> None:
    worker = Worker(kind)
    leg, _ = worker.start()
    arrive(worker, leg)
    assert "claim_forks" not in worker.server.names()


def test_an_outage_repeats_the_same_claim() -> None:
    worker = Worker(UnifiedLegs)
    leg, task = worker.start(forks=1)
    forks(worker, 11)
    worker.server.lose_reply = True
    arrive(worker, leg)
    assert task.beside == []
    worker.flush()
    first, second = [args for name, args in worker.server.called if name == "claim_forks"]
    assert first == second
    assert len(task.beside) == 1


def test_a_claim_that_is_refused_for_good_leaves_the_leader_alone() -> None:
    worker = Worker(UnifiedLegs)
    leg, task = worker.start(forks=1)
    worker.server.replies["claim_forks"] = ResponseError("wrong type")
    arrive(worker, leg)
    assert worker.legs.holds() == [leg.hold]
    assert task.ends == task.beside == []


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", [DecodeLegs, UnifiedLegs])
def test_claimed_forks_run_whatever_becomes_of_their_leader(
    kind: type[DecodeLegs], end: Callable[[Worker, Claimed], None]
) -> None:
    worker = Worker(kind)
    leg, task = worker.start(forks=1)
    (fork,) = forks(worker, 11)
    arrive(worker, leg)
    end(worker, leg)
    assert len(task.ends) == 1
    assert worker.legs.holds() == [fork.hold]
    assert task.beside[0].ends == []


@pytest.mark.parametrize("end", ENDS)
def test_a_fork_ends_early(end: Callable[[Worker, Claimed], None]) -> None:
    worker = Worker()
    leg, task = worker.start(forks=1)
    (fork,) = forks(worker, 11)
    arrive(worker, leg)
    end(worker, fork)
    assert len(task.beside[0].ends) == 1
    assert worker.desk.dropped[fork.hold.nonce] >= 1
    assert worker.legs.holds() == [leg.hold]
    assert task.ends == []


def test_a_leader_that_leaves_claims_no_forks() -> None:
    worker = Worker(UnifiedLegs)
    leg, _ = worker.start(forks=1)
    worker.retract(leg)
    arrive(worker, leg)
    assert "claim_forks" not in worker.server.names()


def test_who_finishes_rings_for_the_forks_it_sets_free() -> None:
    worker = Worker(UnifiedLegs)
    leg, _ = worker.start(forks=1)
    bell = Ring(Leg.PREFILL, "req_11", 20)
    worker.legs.on_outcome(Finished(leg.hold.nonce, "length", (bell,)))
    assert worker.desk.rung == [bell]
