"""Turns of chats find the prefill worker that computed those before: real workers, the real model."""

import random
import signal
from collections.abc import Callable
from typing import Any

import pytest

from relay.request import Leg
from tests.processes import until
from tests.relay_rig import Relay, WorkerProcess

PAGE = 16
CHATS, TURNS = 4, 4
FIRST_TOKENS, MORE_TOKENS, ANSWER_TOKENS = 300, 20, 4
WAIT_MS = 300  # long, for machines that do much else
LATE_MS = 700  # likewise; a leg that nobody is rung for waits for 2,000


@pytest.fixture(scope="module")
def relay(make: Callable[..., Relay]) -> Relay:
    """Two prefill workers that know of each other, and a decode worker."""
    relay = make("by-prefix", "prefill", "prefill", "decode", PREFIX_WAIT_MS=str(WAIT_MS))
    relay.ready()
    redis: Any = relay.rooms.redis
    seconds, microseconds = redis.time()
    ready_ms = seconds * 1e3 + microseconds / 1e3
    index = f"{relay.rooms.root}:workers"
    until(
        lambda: min(seen_ms for _, seen_ms in redis.zrange(index, 0, -1, withscores=True)) > ready_ms,
        "each has renewed",
    )
    return relay


def some(tokens: int, rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choices(range(1_000, 40_000), k=tokens))


def taken_by(relay: Relay, request_id: str) -> WorkerProcess:
    """Who claimed its prefill leg."""
    timeline = relay.rooms.timeline(request_id)
    assert timeline
    (node,) = [each.detail for each in timeline.entries if (each.name, each.leg) == ("claimed", Leg.PREFILL)]
    (card,) = [card for card in relay.cards() if card.name == node]
    return next(worker for worker in relay.workers if card.incarnation.pid == worker.pid)


def test_turns_go_where_their_chat_is(relay: Relay) -> None:
    rng = random.Random(1)
    chats = [some(FIRST_TOKENS, rng) for _ in range(CHATS)]
    turns = found = 0
    for turn in range(TURNS):
        for number, prompt in enumerate(chats):
            request_id = relay.submit(prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True)
            answer = relay.wait(request_id)
            if turn:
                before = FIRST_TOKENS + (turn - 1) * (MORE_TOKENS + ANSWER_TOKENS)
                found += relay.record(request_id).cached_tokens >= before // PAGE * PAGE
                turns += 1
            chats[number] = prompt + answer.tokens + some(MORE_TOKENS, rng)
    counts = relay.rooms.counts()
    assert counts["beginning", "new"] == CHATS
    assert counts["beginning", "here"] >= 0.9 * turns
    assert found >= 0.9 * turns
    until(relay.free, "every page is free or cached")
    until(lambda: relay.tasks() == set(), "what was left to others has ended too")


def test_a_killed_worker_that_has_it_costs_the_wait_alone(relay: Relay) -> None:
    rng = random.Random(2)
    prompt = some(FIRST_TOKENS, rng)
    first = relay.submit(prompt)
    relay.wait(first)
    until(relay.free, "nothing of it is left to do")
    owner = taken_by(relay, first)
    owner.send(signal.SIGKILL)
    owner.process.wait()
    relay.workers.remove(owner)
    turn = relay.submit(prompt + some(MORE_TOKENS, rng))
    relay.wait(turn)
    times = relay.record(turn).timings
    redis: Any = relay.rooms.redis
    left_ms = float(redis.hget(f"{relay.rooms.root}:req:{turn}", "left"))  # it counts as alive for a moment
    assert WAIT_MS <= times.claimed - left_ms < WAIT_MS + LATE_MS
    assert times.claimed - times.submitted < WAIT_MS + 2 * LATE_MS
    again = relay.submit(prompt + some(MORE_TOKENS, rng))
    relay.wait(again)
    assert relay.record(again).cached_tokens >= FIRST_TOKENS // PAGE * PAGE, "it is at the other one now"
