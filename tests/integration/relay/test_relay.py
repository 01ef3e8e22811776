"""The whole relay with the real model: the same text as one worker and as transformers, whatever happens."""

import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from app.gateway.admission import most_output_tokens
from relay.celery import FLUSH_CACHE
from relay.request import Leg, Ring, State
from relay.settings import Settings
from relay.tokenizer import Tokenizer
from tests.models import default_model_in_transformers
from tests.processes import until
from tests.relay_rig import Relay
from tests.servers import RedisServer, valkey_binary

MODEL = Settings.from_env({}).model_path
LONG = 1_500  # tokens: more than a second of prefill
SETTLE_S = 10.0  # what a supervisor gives a worker beyond GRACE_S

WORDS = (
    "river", "engine", "window", "small", "green", "letter", "morning", "teacher", "running", "under",
    "yesterday", "before", "seven", "bright", "kitchen", "question", "because", "paper", "silent", "north",
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL)


@pytest.fixture(scope="module")
def words(tokenizer: Tokenizer) -> Callable[[int, int], tuple[int, ...]]:
    """A prompt of `tokens` tokens, drawn by `seed`."""

    def words(tokens: int, seed: int = 0) -> tuple[int, ...]:
        draw = random.Random(seed)
        text = " ".join(draw.choices(WORDS, k=2 * tokens))
        return tuple(tokenizer.encode(text, add_special_tokens=False))[:tokens]

    return words


Words = Callable[..., tuple[int, ...]]


def greedy(prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """What transformers answers."""
    model: Any = default_model_in_transformers()
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return tuple(out[0, len(prompt) :].tolist())


# ---- the same text


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 63, 64, 65, 150])
def test_relayed_text_is_the_text_of_one_worker_and_of_transformers(
    pair: Relay, alone: Relay, words: Words, tokens: int
) -> None:
    prompt = words(tokens, seed=tokens)
    relayed, unified = pair.submit(prompt), alone.submit(prompt)
    answer = pair.wait(relayed)
    assert answer == alone.wait(unified)
    assert answer.end.state is State.FINISHED
    assert answer.tokens == greedy(prompt, 16)[: len(answer.tokens)]
    assert pair.record(relayed).timings.transfer_bytes > 0


def test_samples_share_one_prefill_and_are_the_text_of_transformers(pair: Relay, words: Words) -> None:
    prompt = words(70, seed=71)
    ids = pair.submit_samples(prompt, 3)
    for request_id in ids:
        answer = pair.wait(request_id)
        assert answer.tokens == greedy(prompt, 16)[: len(answer.tokens)]
    assert [pair.record(i).timings.transfer_bytes > 0 for i in ids] == [True, False, False]


def test_a_cached_prefix_changes_no_text(pair: Relay, alone: Relay, words: Words) -> None:
    begin = words(80, seed=100)
    first = pair.ask(begin + words(20, seed=101))
    for end in (words(20, seed=101), words(30, seed=102), ()):
        request_id = pair.submit(begin + end)
        answer = pair.wait(request_id)
        assert answer == alone.ask(begin + end)
        assert pair.record(request_id).cached_tokens >= 64
        assert end != words(20, seed=101) or answer == first


def test_a_flushed_prefix_is_computed_again(pair: Relay, words: Words) -> None:
    prompt = words(70, seed=103)
    answer = pair.ask(prompt)
    names = [card.name for card in pair.cards()]
    replies = pair.app.control.broadcast(FLUSH_CACHE, destination=names, reply=True, limit=2, timeout=10)
    pages = {name: count for reply in replies for name, count in reply.items()}
    assert set(pages) == set(names)
    assert sum(pages.values()) > 4
    request_id = pair.submit(prompt)
    assert pair.wait(request_id) == answer
    assert pair.record(request_id).cached_tokens == 0


def test_sampling_is_the_same_on_any_worker(pair: Relay, alone: Relay, words: Words) -> None:
    prompt = words(40, seed=7)
    how: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": 1234, "max_tokens": 16, "logprobs": 0}
    ids = pair.submit(prompt, **how), pair.submit(prompt, **how)
    unified = alone.ask(prompt, **how)
    for request_id in ids:
        answer = pair.wait(request_id)
        assert answer.tokens == unified.tokens
        assert answer.logprobs == pytest.approx(unified.logprobs, abs=1e-3)
        assert len(answer.logprobs) == len(answer.tokens)
    assert pair.ask(prompt, **how | {"seed": 1235}).tokens != unified.tokens


def test_many_at_once_are_as_one_by_one(pair: Relay, words: Words) -> None:
    prompts = [words(tokens, seed=200 + i) for i, tokens in enumerate((5, 33, 64, 100) * 4)]
    ids = [pair.submit(prompt, max_tokens=8) for prompt in prompts]
    together = [pair.wait(request_id).tokens for request_id in ids]
    assert together[::3] == [pair.ask(prompt, max_tokens=8).tokens for prompt in prompts[::3]]


def test_where_a_request_ends(pair: Relay, alone: Relay, tokenizer: Tokenizer, words: Words) -> None:
    prompt = words(30, seed=30)
    free = pair.ask(prompt, ignore_eos=True)
    assert len(free.tokens) == 16

    assert pair.ask(prompt, max_tokens=1).tokens == free.tokens[:1]
    stop = free.text[6:12]  # across tokens
    stopped = pair.ask(prompt, stop=(stop,), ignore_eos=True)
    assert stopped == alone.ask(prompt, stop=(stop,), ignore_eos=True)
    assert (stopped.text, stopped.end.stop_reason) == (free.text[: free.text.index(stop)], stop)

    eos = min(tokenizer.eos_ids)
    first_is_end = {"logit_bias": {eos: 100.0}}
    ended = pair.ask(prompt, **first_is_end)
    assert (ended.tokens, ended.end.finish_reason) == ((eos,), "stop")
    later = pair.ask(prompt, min_tokens=5, stop_token_ids=(free.tokens[0],))
    assert later == alone.ask(prompt, min_tokens=5, stop_token_ids=(free.tokens[0],))
    assert len(later.tokens) >= 5


# ---- what an operator sees


def test_the_ledger_of_a_request_is_complete_and_ordered(pair: Relay, words: Words) -> None:
    request_id = pair.submit(words(100, seed=40))
    pair.wait(request_id)
    t = pair.record(request_id).timings
    assert 0 < t.submitted <= t.claimed <= t.prefill_start < t.prefill_end <= t.ready <= t.first_token
    assert t.first_token <= t.ended
    assert t.claimed <= t.decode_claimed <= t.published <= t.ready
    # float32: K and V of 30 layers, 3 heads of 64, for 7 pages of 16 tokens
    assert t.transfer_bytes == 2 * 4 * 30 * 3 * 64 * 7 * 16
    assert 0 < t.transfer_us < 1e6
    assert t.transfer_descriptors > 0


def test_the_timeline_of_a_relay_has_each_chunk_and_each_write(pair: Relay, words: Words) -> None:
    request_id = pair.submit(words(150, seed=44), max_tokens=5, ignore_eos=True)
    pair.wait(request_id)
    timeline = pair.rooms.timeline(request_id)
    assert timeline
    spans, t = timeline.spans(), timeline.record.timings
    prefill_worker, decode_worker = (
        next(card.name for card in pair.cards() if card.role == role) for role in ("prefill", "decode")
    )
    tree = Counter((s.name, s.process, "" if s.parent is None else spans[s.parent].name) for s in spans)
    assert tree.pop(("send", prefill_worker, "transfer")) >= 3  # a write for each chunk
    assert tree == {
        ("accept", "gateway", ""): 1,
        ("queued", "gateway", ""): 1,
        ("bootstrap", prefill_worker, ""): 1,
        ("queued", "gateway", "bootstrap"): 1,
        ("reserve", decode_worker, "bootstrap"): 1,
        ("wait", prefill_worker, ""): 1,
        ("prefill", prefill_worker, ""): 1,
        ("chunk", prefill_worker, "prefill"): 3,
        ("transfer", prefill_worker, ""): 1,
        ("seal", prefill_worker, "transfer"): 1,
        ("admit", decode_worker, ""): 1,
        ("decode", decode_worker, ""): 1,
    }
    by_name = {s.name: s for s in spans}
    assert all(s.end_ms is not None and t.submitted <= s.start_ms <= s.end_ms <= t.ended for s in spans)
    assert sum(s.attributes["tokens"] for s in spans if s.name == "chunk") == 150
    assert sum(s.attributes["bytes"] for s in spans if s.name == "send") == t.transfer_bytes
    assert {s.attributes["layers"] for s in spans if s.name == "send"} == {"0-29"}  # 3 MB are not worth more
    assert by_name["transfer"].end_ms <= by_name["admit"].start_ms  # type: ignore[operator]
    assert (by_name["prefill"].start_ms, by_name["prefill"].end_ms) == pytest.approx(
        (t.prefill_start, t.prefill_end), abs=0.01
    )
    assert by_name["decode"].attributes == {"tokens": 5}


def test_the_ledger_of_one_worker_has_its_prefill_too(alone: Relay, words: Words) -> None:
    prompt = words(100, seed=43)
    for cached_tokens in (0, 96):
        request_id = alone.submit(prompt, max_tokens=1)
        alone.wait(request_id)
        record = alone.record(request_id)
        t = record.timings
        assert 0 < t.submitted <= t.claimed <= t.prefill_start < t.prefill_end <= t.first_token <= t.ended
        assert (record.cached_tokens, t.transfer_bytes) == (cached_tokens, 0)
        timeline = alone.rooms.timeline(request_id)
        assert timeline
        spans = timeline.spans()
        assert [s.name for s in spans[:4]] == ["accept", "queued", "prefill", "wait"]
        assert sum(s.attributes["tokens"] for s in spans if s.name == "chunk") == 100 - cached_tokens
        assert (spans[-1].name, spans[-1].end_ms) == ("decode", t.ended)


def test_running_legs_are_running_tasks(pair: Relay, words: Words) -> None:
    request_id = pair.submit(words(20, seed=41), max_tokens=2_000, ignore_eos=True)
    pair.reaches(request_id, lambda record: record.completion_tokens, "it decodes")
    assert pair.tasks() == {("kvrelay.decode", request_id)}
    pair.rooms.cancel(request_id)


def test_terminate_in_flower_cancels_the_request(pair: Relay, words: Words) -> None:
    request_id = pair.submit(words(20, seed=42), max_tokens=2_000, ignore_eos=True)
    pair.reaches(request_id, lambda record: record.completion_tokens, "it decodes")
    (task,) = [task for tasks in pair.inspect("active").values() for task in tasks]
    pair.app.control.revoke(task["id"], terminate=True)
    assert pair.wait(request_id).end.state is State.CANCELLED
    until(pair.free, "its pages are free", 1.0)


# ---- cancel, wherever a request is


def cancelled(pair: Relay, request_id: str) -> None:
    record = pair.rooms.cancel(request_id).record
    assert record is not None
    assert record.state is State.CANCELLED
    until(pair.free, "every page is free or cached", 1.0)
    assert pair.record(request_id).state is State.CANCELLED


def test_cancel_while_it_is_queued(pair: Relay, words: Words) -> None:
    request_id = pair.submit(words(20, seed=50), ring=False)
    cancelled(pair, request_id)
    pair.ring(Ring(Leg.PREFILL, request_id))
    until(lambda: pair.tasks() == set(), "its doorbell finds nothing")


def test_cancel_while_it_is_computed_and_its_pages_are_published(pair: Relay, words: Words) -> None:
    request_id = pair.submit(words(LONG, seed=51))
    pair.reaches(request_id, lambda record: record.timings.published, "its pages are published")
    assert pair.record(request_id).state is State.PREFILL
    cancelled(pair, request_id)


def test_cancel_while_it_waits_for_a_decode_worker(pair: Relay, words: Words) -> None:
    decode = next(worker for worker in pair.workers if worker.role == "decode")
    decode.send(signal.SIGSTOP)
    try:
        request_id = pair.submit(words(20, seed=52))
        pair.reaches(request_id, lambda record: record.state is State.PREFILL, "it is claimed")
        until(lambda: pair.rooms.waiting(Leg.DECODE).legs == 1, "its decode leg waits")
        assert pair.rooms.cancel(request_id).record
    finally:
        decode.send(signal.SIGCONT)
    until(pair.free, "every page is free or cached")


def test_cancel_while_it_decodes(pair: Relay, words: Words) -> None:
    request_id = pair.submit(words(20, seed=53), max_tokens=2_000, ignore_eos=True)
    pair.reaches(request_id, lambda record: record.completion_tokens > 3, "it decodes")
    cancelled(pair, request_id)


# ---- KV that leaves while the prompt is computed


def test_groups_of_layers_leave_before_the_prompt_is_computed(
    make: Callable[..., Relay], alone: Relay, words: Words
) -> None:
    grouped = make("grouped", "prefill", "decode", CHUNK_TOKENS="512")
    grouped.ready()
    prompt = words(450, seed=45)
    request_id = grouped.submit(prompt, ignore_eos=True)
    assert grouped.wait(request_id) == alone.ask(prompt, ignore_eos=True)
    timeline = grouped.rooms.timeline(request_id)
    assert timeline
    spans = timeline.spans()
    (chunk,) = (s for s in spans if s.name == "chunk")
    sends = [s for s in spans if s.name == "send" and "layers" in s.attributes]
    assert [s.attributes["layers"] for s in sends] == ["0-6", "7-13", "14-20", "21-27", "28-29"]
    assert chunk.end_ms
    assert max(s.start_ms for s in sends[:2]) < chunk.end_ms


# ---- workers that come, go, do not fit, or are full


def test_workers_may_come_late_and_two_models_do_not_mix(
    pair: Relay, make: Callable[..., Relay], tiny: Path, words: Words
) -> None:
    late = make("tiny", MODEL=str(tiny))
    prompt = tuple(range(5, 45))
    waits = late.submit(prompt, ignore_eos=True)
    here = pair.submit(words(30, seed=60))
    assert pair.wait(here).end.state is State.FINISHED
    assert late.record(waits).state is State.QUEUED
    late.start("prefill", "decode")
    answer = late.wait(waits)
    assert late.rooms.record(here) is None
    assert len(answer.tokens) == 16

    # A worker that leaves under load: nothing is lost, and no attempt is counted.
    prefill, decode = late.workers
    ids = [late.submit(prompt[i:], max_tokens=100, ignore_eos=True) for i in range(8)]
    late.reaches(ids[0], lambda record: record.completion_tokens, "it decodes")
    late.start("prefill", "decode")
    late.ready()
    assert late.stop(decode) == 0
    assert late.stop(prefill) == 0
    for request_id in ids:
        assert len(late.wait(request_id).tokens) == 100
        assert late.record(request_id).attempts == 1
    assert late.ask(prompt, ignore_eos=True).tokens == answer.tokens


def test_a_small_pool_retracts_and_the_texts_stay_the_same(make: Callable[..., Relay], tiny: Path) -> None:
    small = make("small", "prefill", MODEL=str(tiny))
    small.start("decode", KV_POOL_TOKENS="256", RESERVE_TOKENS="16")
    small.ready()
    prompts = [tuple(range(5 + i, 37 + i)) for i in range(6)]
    how: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True}
    alone = [small.ask(prompt, **how).tokens for prompt in prompts]
    ids = [small.submit(prompt, **how) for prompt in prompts]
    assert [small.wait(request_id).tokens for request_id in ids] == alone
    assert sum(small.record(request_id).retractions for request_id in ids) > 0
    assert [small.record(request_id).attempts for request_id in ids] == [1] * 6
    until(small.free, "every page is free or cached")

    # 300 tokens fit the prefill worker and no decode worker: the gateway refuses, and no worker claims.
    assert most_output_tokens(300, small.cards()) < 0
    too_big = small.submit((5,) * 300)
    small.reaches(too_big, lambda record: record.state is State.PREFILL, "its prefill leg is claimed")
    assert small.ask(prompts[0], max_tokens=1).tokens == alone[0][:1]
    assert small.rooms.waiting(Leg.DECODE).legs == 1
    small.rooms.cancel(too_big)
    until(small.free, "every page is free or cached")


@pytest.mark.parametrize(("setting", "value"), [("PAGE_SIZE", "32"), ("DTYPE", "bfloat16")])
def test_workers_that_differ_fail_the_request_and_live_on(
    make: Callable[..., Relay], tiny: Path, setting: str, value: str
) -> None:
    differ = make(f"differ-{setting}", "prefill", MODEL=str(tiny))
    differ.start("decode", **{setting: value})
    differ.ready()
    answer = differ.ask(tuple(range(5, 45)))
    assert (answer.end.state, answer.end.error_code) == (State.FAILED, "geometry_mismatch")
    assert setting.lower() in str(answer.end.error_message)
    until(differ.free, "every page is free or cached")
    assert len(differ.cards()) == 2
    differ.close()


def test_workers_end_in_time_also_while_redis_is_away(tiny: Path, tmp_path: Path) -> None:
    with RedisServer(valkey_binary(), tmp_path / "valkey", append_fsync="always") as server:
        cut_off = Relay(server, tmp_path, "cut-off", MODEL=str(tiny), GRACE_S="1")
        try:
            workers = cut_off.start("prefill", "decode")
            cut_off.ready()
            request_id = cut_off.submit(range(5, 45), max_tokens=300, ignore_eos=True)
            cut_off.reaches(request_id, lambda record: record.completion_tokens, "it decodes")
            server.kill()
            for worker in workers:
                worker.send(signal.SIGTERM)
            assert [worker.process.wait(1 + SETTLE_S) for worker in workers] == [0, 0]

            # What they could not give back comes to the next ones by its lease.
            server.start()
            cut_off.workers.clear()
            cut_off.start("prefill", "decode")
            assert len(cut_off.wait(request_id).tokens) == 300
            assert cut_off.record(request_id).attempts <= 2
        finally:
            cut_off.close()
