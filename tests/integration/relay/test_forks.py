"""Samples of one prompt through real workers: one prefill, shared KV, and the same texts whatever happens."""

import contextlib
import signal
from collections.abc import Callable
from typing import Any

import pytest
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from relay.request import Leg, Ring, State
from relay.sampling import SamplingParams
from tests.processes import until
from tests.relay_rig import Answer, Relay, WorkerProcess
from tests.servers import RedisServer

TINY, APPEND_FSYNC = True, "always"
PAGE = 16
PROMPT = tuple(5 + i % 50 for i in range(70))  # four whole pages and six tokens
WHOLE, TAIL = divmod(len(PROMPT), PAGE)
Make = Callable[..., Relay]
LONG: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 1234, "ignore_eos": True}


def engine(relay: Relay, role: str) -> dict[str, Any]:
    """A worker is registered a moment before Celery hears what is asked of it."""

    def answered() -> dict[str, Any] | None:
        return next((pool for pool in relay.engines() if pool["role"] == role), None)

    found: dict[str, Any] = until(answered, f"the {role} worker answers")
    return found


def answers(relay: Relay, ids: list[str]) -> list[Answer]:
    found = [relay.wait(request_id) for request_id in ids]
    assert {answer.end.state for answer in found} == {State.FINISHED}
    return found


def decoding(relay: Relay, ids: list[str]) -> None:
    """Wait until every sample has a token."""
    for request_id in ids:
        relay.reaches(request_id, lambda record: record.completion_tokens, "it decodes")


def fresh(number: int) -> tuple[int, ...]:
    """A prompt of the same length that no worker has met."""
    return (number, *PROMPT[1:])


# ---- one prefill


def test_the_kv_of_one_prefill_is_shared(pair: Relay, alone: Relay) -> None:
    before = {role: engine(pair, role) for role in ("prefill", "decode")}
    ids = pair.submit_samples(PROMPT, 3, **LONG)
    decoding(pair, ids)
    assert pair.tasks() == {("kvrelay.decode", request_id) for request_id in ids}
    texts = answers(pair, ids)
    assert [answer.tokens for answer in texts] == [alone.ask(PROMPT, **LONG).tokens] * 3

    after = {role: engine(pair, role) for role in ("prefill", "decode")}
    computed = {role: after[role]["prefill_tokens"] - before[role]["prefill_tokens"] for role in after}
    assert computed == {"prefill": len(PROMPT), "decode": 2 * TAIL}
    leader, *forks = map(pair.record, ids)
    assert leader.timings.transfer_bytes > 0
    assert [(fork.timings.transfer_bytes, fork.cached_tokens) for fork in forks] == [(0, WHOLE * PAGE)] * 2


def test_one_worker_shares_too(alone: Relay) -> None:
    prompt = fresh(60)
    before = engine(alone, "unified")["prefill_tokens"]
    texts = answers(alone, alone.submit_samples(prompt, 3, max_tokens=40, ignore_eos=True))
    assert engine(alone, "unified")["prefill_tokens"] - before == len(prompt) + 2 * TAIL
    assert len({answer.tokens for answer in texts}) == 1
    assert len(texts[0].tokens) == 40


def test_samples_are_those_of_single_requests_with_their_seeds(pair: Relay, alone: Relay) -> None:
    texts = answers(pair, pair.submit_samples(PROMPT, 4, **SAMPLED))
    params = SamplingParams(max_tokens=16, seed=SAMPLED["seed"])
    seeds = [params.sample(index).seed for index in range(4)]
    singles = [alone.ask(PROMPT, **SAMPLED | {"seed": seed}).tokens for seed in seeds]
    assert [answer.tokens for answer in texts] == singles
    assert len(set(singles)) == 4


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_short_answers_leave_nobody_behind(pair: Relay, alone: Relay, max_tokens: int) -> None:
    """The leader may have finished before its forks are claimed: then they take the long way."""
    for relay in (pair, alone):
        texts = answers(relay, relay.submit_samples(PROMPT, 5, max_tokens=max_tokens, ignore_eos=True))
        assert len({answer.tokens for answer in texts}) == 1


def test_more_samples_than_a_worker_has_room_for(make: Make, alone: Relay) -> None:
    """The others go through the relay like any request, and meet the cached prompt there."""
    small = make("small", "prefill")
    small.start("decode", MAX_RUNNING="3")
    small.ready()
    texts = answers(small, small.submit_samples(PROMPT, 8, max_tokens=40, ignore_eos=True))
    assert [answer.tokens for answer in texts] == [
        alone.ask(PROMPT, max_tokens=40, ignore_eos=True).tokens
    ] * 8
    assert engine(small, "prefill")["cached_tokens"] > 0
    until(small.free, "every page is free or cached")


def test_a_pool_too_small_for_all_retracts_and_the_texts_stay_the_same(make: Make, alone: Relay) -> None:
    small = make("tight", "prefill")
    small.start("decode", KV_POOL_TOKENS="512", RESERVE_TOKENS="16")
    small.ready()
    ids = small.submit_samples(PROMPT, 6, max_tokens=200, ignore_eos=True)
    texts = answers(small, ids)
    expected = alone.ask(PROMPT, max_tokens=200, ignore_eos=True).tokens
    assert [answer.tokens for answer in texts] == [expected] * 6
    assert sum(small.record(i).retractions for i in ids) > 0
    assert [small.record(i).attempts for i in ids] == [1] * 6
    until(small.free, "every page is free or cached")


# ---- cancel, wherever a group is


def test_cancel_while_the_leader_is_queued(pair: Relay) -> None:
    ids = pair.submit_samples(PROMPT, 3, ring=False)
    pair.rooms.cancel(*ids)
    pair.ring(Ring(Leg.PREFILL, ids[0]))
    assert {pair.wait(i).end.state for i in ids} == {State.CANCELLED}


def test_a_cancelled_leader_sets_its_forks_free(pair: Relay, alone: Relay) -> None:
    ids = pair.submit_samples(PROMPT, 3, ring=False)
    for bell in pair.rooms.cancel(ids[0]).rings:
        pair.ring(bell)
    texts = answers(pair, ids[1:])
    assert [answer.tokens for answer in texts] == [alone.ask(PROMPT).tokens] * 2


def test_cancel_while_all_decode(pair: Relay) -> None:
    ids = pair.submit_samples(PROMPT, 3, **LONG)
    decoding(pair, ids)
    pair.rooms.cancel(*ids)
    assert {pair.wait(i).end.state for i in ids} == {State.CANCELLED}
    until(pair.free, "every page is free or cached", 1.0)


def test_terminate_in_flower_cancels_one_sample(pair: Relay) -> None:
    ids = pair.submit_samples(PROMPT, 3, **LONG)
    decoding(pair, ids)
    (task,) = [t for tasks in pair.inspect("active").values() for t in tasks if t["args"] == [ids[1]]]
    pair.app.control.revoke(task["id"], terminate=True)
    states = [pair.wait(i).end.state for i in ids]
    assert states == [State.FINISHED, State.CANCELLED, State.FINISHED]


# ---- workers and servers that die


def heard(relay: Relay) -> bool:
    with contextlib.suppress(RedisError, OperationalError):
        return len(relay.inspect("ping")) == len(relay.workers)
    return False


def two_of(make: Make, name: str, role: str) -> tuple[Relay, list[WorkerProcess]]:
    """A relay with two workers of one role."""
    other = "decode" if role == "prefill" else "prefill"
    relay = make(name, other, role, role)
    relay.ready()
    return relay, [worker for worker in relay.workers if worker.role == role]


def busy(relay: Relay, workers: list[WorkerProcess], request_id: str) -> WorkerProcess:
    """Who runs a leg of this request in this role."""
    active = relay.inspect("active")
    (name,) = [
        name
        for name, tasks in active.items()
        if any(task["args"] == [request_id] for task in tasks)
        and any(worker.log.stem in name for worker in workers)
    ]
    (found,) = [worker for worker in workers if worker.log.stem in name]
    return found


def kill(relay: Relay, worker: WorkerProcess) -> None:
    worker.end()
    relay.workers.remove(worker)


def test_a_decode_worker_dies_with_forks_running(make: Make, alone: Relay) -> None:
    relay, decoders = two_of(make, "dying-decode", "decode")
    ids = relay.submit_samples(PROMPT, 3, **LONG)
    decoding(relay, ids)
    kill(relay, busy(relay, decoders, ids[1]))
    texts = answers(relay, ids)
    assert [answer.tokens for answer in texts] == [alone.ask(PROMPT, **LONG).tokens] * 3
    assert min(relay.record(i).attempts for i in ids) > 1
    until(relay.free, "every page is free or cached")


def test_a_prefill_worker_dies_before_the_forks_are_claimed(make: Make, alone: Relay) -> None:
    relay, prefills = two_of(make, "dying-prefill", "prefill")
    decode = next(worker for worker in relay.workers if worker.role == "decode")
    decode.send(signal.SIGSTOP)  # so that the leader waits where it is
    ids = relay.submit_samples(PROMPT, 3, max_tokens=40, ignore_eos=True)
    relay.reaches(ids[0], lambda record: record.state is State.PREFILL, "its prefill leg is claimed")
    kill(relay, busy(relay, prefills, ids[0]))
    relay.reaches(ids[0], lambda record: record.attempts > 1, "its lease has ended")
    decode.send(signal.SIGCONT)
    texts = answers(relay, ids)
    assert [answer.tokens for answer in texts] == [
        alone.ask(PROMPT, max_tokens=40, ignore_eos=True).tokens
    ] * 3
    assert relay.record(ids[1]).timings.transfer_bytes > 0, "set free, it was relayed"
    until(relay.free, "every page is free or cached")


def test_a_worker_that_leaves_hands_the_samples_on(make: Make, alone: Relay) -> None:
    relay, decoders = two_of(make, "leaving", "decode")
    ids = relay.submit_samples(PROMPT, 3, **LONG)
    decoding(relay, ids)
    leaves = busy(relay, decoders, ids[1])
    leaves.send(signal.SIGTERM)
    leaves.send(signal.SIGTERM)
    leaves.process.wait(30)
    relay.workers.remove(leaves)
    texts = answers(relay, ids)
    assert [answer.tokens for answer in texts] == [alone.ask(PROMPT, **LONG).tokens] * 3
    assert [relay.record(i).attempts for i in ids] == [1, 1, 1]
    until(relay.free, "every page is free or cached")


@pytest.mark.parametrize("claimed", [False, True])
def test_redis_restarts(server: RedisServer, pair: Relay, alone: Relay, claimed: bool) -> None:
    expected = alone.ask(PROMPT, **LONG).tokens
    ids = pair.submit_samples(PROMPT, 3, ring=claimed, **LONG)
    if claimed:
        decoding(pair, ids)
    server.kill()
    server.start()
    assert [answer.tokens for answer in answers(pair, ids)] == [expected] * 3
    until(lambda: heard(pair), "the workers answer again")
