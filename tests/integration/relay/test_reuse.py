"""A decode worker is sent only the pages that it lacks: by real workers over NIXL, with the real model."""

import random
import signal
from collections.abc import Callable
from typing import Any

import pytest

from relay.request import Record, State
from relay.settings import Settings
from relay.tokenizer import Tokenizer
from tests.integration.relay.test_relay import LONG, WORDS, greedy
from tests.processes import until
from tests.relay_rig import Relay

PAGE = 16
PAGE_BYTES = 2 * 4 * 30 * 3 * 64 * PAGE  # float32: K and V of 30 layers, 3 heads of 64
Prompt = Callable[[int, int], tuple[int, ...]]


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    """Of so many tokens, drawn by a seed."""
    tokenizer = Tokenizer.load(Settings.from_env({}).model_path)

    def prompt(tokens: int, seed: int) -> tuple[int, ...]:
        text = " ".join(random.Random(seed).choices(WORDS, k=2 * tokens))
        return tuple(tokenizer.encode(text, add_special_tokens=False))[:tokens]

    return prompt


def moved(record: Record) -> tuple[float, float]:
    """Pages that were sent, and that were not."""
    return record.timings.transfer_bytes / PAGE_BYTES, record.timings.spared_bytes / PAGE_BYTES


def engine(relay: Relay, role: str = "decode") -> dict[str, Any]:
    return next(answer for answer in relay.engines() if answer["role"] == role)


def test_a_shared_beginning_is_sent_once(pair: Relay, alone: Relay, prompt: Prompt) -> None:
    begin = prompt(80, 1)
    for end, there in ((prompt(30, 2), 0), (prompt(30, 3), 5), (prompt(20, 4), 5), ((), 5)):
        request_id = pair.submit(begin + end)
        answer = pair.wait(request_id)
        assert answer == alone.ask(begin + end)
        assert answer.tokens == greedy(begin + end, 16)[: len(answer.tokens)]
        assert moved(pair.record(request_id)) == (-(-len(begin + end) // PAGE) - there, there)
    timeline = pair.rooms.timeline(request_id)
    assert timeline
    (transfer,) = [span for span in timeline.spans() if span.name == "transfer"]
    assert transfer.attributes["bytes"] == 0, "of a prompt that was there the seal alone travels"
    assert transfer.attributes["spared_pages"] == 5


def test_a_chat_sends_what_its_last_turn_added(pair: Relay, alone: Relay, prompt: Prompt) -> None:
    """The answer before it was computed where it is."""
    chat = prompt(100, 10)
    before = engine(pair)
    for turn in range(3):
        request_id = pair.submit(chat, max_tokens=24, ignore_eos=True)
        answer = pair.wait(request_id)
        assert answer == alone.ask(chat, max_tokens=24, ignore_eos=True)
        there = (len(chat) - 20 - 1) // PAGE if turn else 0  # of its last token there was no KV
        assert moved(pair.record(request_id)) == (-(-len(chat) // PAGE) - there, there)
        chat = chat + answer.tokens + prompt(20, 11 + turn)
    after = engine(pair)
    counted = {name: after[name] - before[name] for name in ("reserved_tokens", "spared_tokens")}
    assert counted["reserved_tokens"] == 100 + 144 + 188
    assert counted["spared_tokens"] == PAGE * (123 // PAGE + 167 // PAGE)


def test_requests_at_once_hold_the_pages_of_their_system_prompt_once(pair: Relay, prompt: Prompt) -> None:
    system = prompt(40 * PAGE, 20)
    pair.ask(system, max_tokens=1)
    ids = [pair.submit(system + prompt(10, 21 + i), max_tokens=200, ignore_eos=True) for i in range(4)]
    for request_id in ids:
        pair.reaches(request_id, lambda record: record.completion_tokens, "it decodes")
    held, running = engine(pair)["held_pages"], engine(pair)["running"]
    for request_id in ids:
        assert len(pair.wait(request_id).tokens) == 200
        assert moved(pair.record(request_id)) == (1, 40)
    assert running == 4
    assert held <= 40 + 4 * -(-211 // PAGE), "not 40 for each of them"


def test_another_owner_finds_nothing(pair: Relay, prompt: Prompt) -> None:
    begin = prompt(64, 30)
    for salt, there in (("a", 0), ("b", 0), ("a", 4)):
        request_id = pair.submit(begin, cache_salt=salt)
        pair.wait(request_id)
        assert moved(pair.record(request_id)) == (4 - there, there)


def test_a_scored_prompt_is_sent_in_part(pair: Relay, alone: Relay, prompt: Prompt) -> None:
    begin = prompt(70, 40)
    pair.ask(begin)
    request_id, there = (relay.submit(begin, prompt_logprobs=1) for relay in (pair, alone))
    assert pair.wait(request_id) == alone.wait(there)
    scores, expected = pair.rooms.scores(request_id), alone.rooms.scores(there)
    assert scores is not None
    assert expected is not None
    assert moved(pair.record(request_id)) == (1, 4)
    assert pair.record(request_id).cached_tokens == 0


def test_a_dead_writer_leaves_only_the_new_pages_in_quarantine(
    make: Callable[..., Relay], alone: Relay, prompt: Prompt
) -> None:
    relay = make("dies", "prefill", "decode")
    relay.ready()
    begin = prompt(160, 50)
    relay.ask(begin)
    long = begin + prompt(LONG - len(begin), 51)
    request_id = relay.submit(long)
    relay.reaches(request_id, lambda record: record.timings.published, "its pages are published")
    writer = next(worker for worker in relay.workers if worker.role == "prefill")
    writer.send(signal.SIGSTOP)
    assert relay.record(request_id).state is State.PREFILL, "in the middle of it"
    relay.workers.remove(writer)
    try:
        new = -(-LONG // PAGE) - len(begin) // PAGE
        until(lambda: engine(relay)["quarantined_pages"], "its writer's lease ends")
        pool = engine(relay)
        assert (pool["quarantined_pages"], pool["held_pages"]) == (new, 0)
        assert pool["cached_pages"] >= len(begin) // PAGE
    finally:
        writer.end()
    until(lambda: not engine(relay)["quarantined_pages"], "its death is proof")
    relay.start("prefill")
    assert relay.wait(request_id) == alone.ask(long)
    assert moved(relay.record(request_id)) == (new, len(begin) // PAGE)
    until(relay.free, "every page is free or cached")
