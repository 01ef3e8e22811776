"""Steps launched before the one they follow is read: what runs ahead, what waits, who keeps which pages."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from relay.sampling import SamplingParams
from tests.engine_rig import EOS, PAGE_SIZE, Relay, Rig, continuation, relayed, unified, work
from tests.unit.test_engine_legs import BrokenModel, a_prompt_that_meets, params
from workers.engine.messages import (
    Drop,
    Ending,
    Failed,
    Prefilled,
    Refused,
    Reserve,
    Reserved,
    Retracted,
    Stop,
)
from workers.engine.runner import ModelRunner

PLAIN: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
ASKING: tuple[dict[str, Any], ...] = (
    {"logprobs": 2},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.5},
    {"logit_bias": {3: 2.0}},
    {"min_tokens": 19},
)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rig, "late", True)


def at_once(monkeypatch: pytest.MonkeyPatch, **config: Any) -> Rig:
    with monkeypatch.context() as patch:
        patch.setattr(Rig, "late", False)
        return Rig(**config)


def told(rig: Rig) -> dict[str, list[object]]:
    """What was produced for each leg, without times."""
    legs: dict[str, list[object]] = {}
    for produced in rig.produced:
        legs.setdefault(produced.key, []).append(produced._replace(prompted=None))
    return legs


def test_the_next_step_is_launched_before_this_one_is_read() -> None:
    rig = Rig()
    rig.submit(unified("a", [1, 2, 3], tokens=5))
    rig.step()
    assert (rig.model.batch_sizes, rig.produced) == ([], []), "a launch waits for nothing"
    rig.step()
    assert (len(rig.model.batch_sizes), len(rig.produced)) == (1, 1)
    rig.run()
    assert rig.device.most_launched == 2
    assert rig.text("a") == continuation([1, 2, 3], 5)


@pytest.mark.parametrize("seed", range(8))
def test_random_parameters_give_the_same_tokens_as_at_once(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    legs = []
    for i in range(6):
        given: dict[str, Any] = {"max_tokens": draw.randint(1, 20), "seed": i}
        given["temperature"] = draw.choice([0.0, 0.8, 2.0])
        given |= draw.choice([{}, {}, {"top_k": 9}, {"top_p": 0.7}, *ASKING]) if seed % 2 else {}
        given |= {"stop_token_ids": (draw.randrange(50),), "min_tokens": 0} if draw.random() < 0.5 else {}
        prompt = [draw.randrange(1, 50) for _ in range(draw.randint(1, 30))]
        legs.append(unified(f"leg{i}", prompt, params=SamplingParams(**given), solo=draw.random() < 0.1))
    rigs = [Rig(chunk_tokens=8), at_once(monkeypatch, chunk_tokens=8)]
    for rig in rigs:
        for leg in legs:
            rig.submit(leg)
            rig.step()
        rig.run()
    assert told(rigs[0]) == told(rigs[1])


def test_no_token_is_computed_in_vain_where_the_length_ends_a_leg(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    for rig in (Rig(context_tokens=12), at_once(monkeypatch, context_tokens=12)):
        for key, tokens in (("a", 1), ("b", 4), ("c", 100)):
            rig.submit(unified(key, [1, 2, 3], tokens=tokens))
        rig.run()
        passes.append(sum(rig.model.batch_sizes))
        assert [len(rig.text(key)) for key in "abc"] == [1, 4, 9]
    assert passes[0] == passes[1]


def test_one_token_is_computed_in_vain_after_the_end_of_a_text() -> None:
    prompt, at = a_prompt_that_meets(EOS)
    rig = Rig()
    rig.submit(unified("a", prompt, params=params()))
    while not (rig.produced and rig.produced[-1].ending):
        rig.step()
    assert rig.produced[-1].ending == Ending.STOP
    held = rig.engine.headroom.held_pages
    assert held == -(-(len(prompt) + at + 1) // PAGE_SIZE), "a launched step still writes there"
    rig.run()
    assert rig.text("a") == continuation(prompt, at + 1)
    assert len(rig.model.batch_sizes) == at + 2
    assert rig.engine.headroom.held_pages == 0
    assert rig.engine.headroom.cached_pages == (len(prompt) + at) // PAGE_SIZE


def test_pages_that_a_step_writes_are_nobody_elses() -> None:
    rig = Rig(pages=2, reserve_tokens=0)
    rig.submit(unified("a", [1, 2, 3], tokens=5))
    rig.step()
    rig.submit(Drop("a"), Reserve(work("b", [4] * 2 * PAGE_SIZE)))
    rig.step()
    rig.the(Refused, "b")
    rig.submit(Reserve(work("c", [4] * 2 * PAGE_SIZE)))
    rig.step()
    assert len(rig.the(Reserved, "c").pages) == 2
    assert rig.produced == []


def test_a_dropped_leg_is_told_of_no_more() -> None:
    rig = Rig()
    rig.submit(unified("a", [1, 2, 3], tokens=9), unified("b", [4, 5], tokens=9))
    for _ in range(4):
        rig.step()
    rig.submit(Drop("a"))
    before = rig.text("a")
    rig.run()
    assert rig.text("a") == before == continuation([1, 2, 3], len(before))
    assert rig.text("b") == continuation([4, 5], 9)
    assert rig.engine.headroom.held_pages == 0


@pytest.mark.parametrize("asking", ASKING, ids=lambda given: next(iter(given)))
def test_what_needs_the_host_to_choose_is_read_first(
    asking: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    rigs = [Rig(), at_once(monkeypatch)]
    for rig in rigs:
        rig.submit(unified("a", [1, 2, 3], params=SamplingParams(**PLAIN | asking)))  # type: ignore[arg-type]
        rig.submit(unified("b", [4, 5], params=SamplingParams(**PLAIN)))  # type: ignore[arg-type]
        rig.run()
    assert rigs[0].device.most_launched == 1
    assert rigs[0].model.batch_sizes == rigs[1].model.batch_sizes
    assert told(rigs[0]) == told(rigs[1])


def test_chunks_of_a_prompt_run_ahead_and_are_sent_when_they_are_there() -> None:
    rig = Rig(chunk_tokens=8, group_layers=2)
    rig.submit(relayed("a", list(range(1, 25))))
    rig.step()
    rig.step()
    ready = [part.ready is not None and part.ready() for part in rig.computed]
    assert ready == [True, True, False, False]
    rig.run()
    assert rig.the(Prefilled, "a").first.token_id == continuation(list(range(1, 25)), 1)[0]
    assert len(rig.model.batch_sizes) == 3
    assert all(part.ready is not None and part.ready() for part in rig.computed)


def test_pages_are_found_by_others_only_once_they_are_computed() -> None:
    rig, prompt = Rig(chunk_tokens=16), [3] * 16
    rig.submit(relayed("a", prompt), relayed("b", [*prompt, 4]))
    rig.run()
    for _ in range(2):
        rig.step()
    assert rig.admitted("b").cached_tokens == 0
    rig.submit(relayed("c", [*prompt, 5]))
    rig.run()
    assert rig.admitted("c").cached_tokens == 16


def test_a_leg_is_retracted_only_with_every_token_told(monkeypatch: pytest.MonkeyPatch) -> None:
    retracted = []
    for rig in (Rig(pages=9, reserve_tokens=1), at_once(monkeypatch, pages=9, reserve_tokens=1)):
        for i in range(4):
            rig.submit(unified(f"leg{i}", [i + 1] * 6, tokens=16, arrival_ms=float(i)))
        rig.run()
        events = [event.key for event in rig.events if isinstance(event, Retracted)]
        retracted.append([(key, len(rig.text(key))) for key in events])
        for i in range(4):
            text = rig.text(f"leg{i}")
            assert text == continuation([i + 1] * 6, len(text))
    assert retracted[0] == retracted[1] != []


def test_a_leg_without_a_choosable_token_fails_alone() -> None:
    rig = Rig(chunk_tokens=100)
    rig.model = rig.device._model = BrokenModel()  # type: ignore[assignment]
    rig.submit(unified("bad", [13] * 9))
    rig.step()
    rig.submit(unified("good", [1, 2, 3]))
    rig.run()
    assert rig.model.batch_sizes[1] == 2, "it had gone on with a token that means nothing"
    assert "logit" in rig.the(Failed, "bad").reason
    assert not any(produced.key == "bad" for produced in rig.produced)
    assert rig.text("good") == continuation([1, 2, 3], 8)
    assert rig.engine.headroom.held_pages == 3
    rig.submit(Drop("bad"))
    rig.run()
    assert rig.engine.headroom.held_pages == 0


def test_solo_work_is_alone_on_the_device() -> None:
    rig = Rig()
    rig.submit(unified("suspect", [1, 2, 3], solo=True), unified("a", [4, 5]), unified("b", [6]))
    rig.run()
    assert rig.device.most_launched == 1
    assert set(rig.model.batch_sizes) == {1, 2}


def test_stop_waits_for_what_was_launched() -> None:
    rig = Rig()
    rig.submit(unified("a", [1, 2, 3]))
    rig.step()
    rig.submit(Stop())
    assert not rig.step()
    assert len(rig.model.batch_sizes) == 1
    assert rig.text("a") == continuation([1, 2, 3], 1)


def test_a_deadline_stands_for_all_that_was_launched() -> None:
    rig = Rig()
    rig.submit(unified("a", [1, 2, 3], tokens=3))
    assert rig.engine.heartbeat.deadline is None
    for step in (1, 2):
        rig.step()
        assert rig.engine.heartbeat.step == step
        assert rig.engine.heartbeat.deadline is not None
    rig.run()
    assert rig.engine.heartbeat == (3, None)


def test_the_first_token_of_a_leg_that_joins_is_known() -> None:
    """Prebuilt legs bring a token, so they share a step with legs whose token only the device knows."""
    relay = Relay(Rig(), Rig(pages=80))
    relay.decode.submit(unified("other", [7, 8], tokens=30))
    for _ in range(4):
        relay.decode.step()
    leg = relayed("a", [1, 2, 3])
    relay.reserve(leg)
    relay.prefill.submit(leg)
    relay.prefill.run()
    relay.finish(leg)
    relay.decode.run()
    assert relay.decode.text("a") == continuation([1, 2, 3], 8)
    assert relay.decode.text("other") == continuation([7, 8], 30)
    assert relay.decode.device.most_launched == 2


def test_the_log_probabilities_of_a_prompt_are_those_of_steps_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scores = []
    for rig in (Rig(chunk_tokens=8), at_once(monkeypatch, chunk_tokens=8)):
        scored = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, prompt_logprobs=2)
        rig.submit(unified("other", [7, 8], tokens=12), unified("a", list(range(1, 22)), params=scored))
        rig.run()
        assert rig.text("a") == continuation(list(range(1, 22)), 4)
        assert rig.text("other") == continuation([7, 8], 12)
        (first,) = [p.prompted for p in rig.produced if p.key == "a" and p.prompted is not None]
        assert first.scores is not None
        scores.append([part.tolist() for part in first.scores])
    assert scores[0] == scores[1]
    assert len(scores[0][0]) == 20


def test_the_runner_of_a_gpu_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own code on a CPU, with events and pinned memory played."""
    waits: list[str] = []
    event = SimpleNamespace(record=lambda: waits.append("mark"), synchronize=lambda: waits.append("wait"))
    plain = torch.empty_like
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch, "empty_like", lambda like, **_: plain(like))
    rigs = [at_once(monkeypatch, chunk_tokens=8), at_once(monkeypatch, chunk_tokens=8)]
    for rig, ahead in zip(rigs, (1, 0), strict=True):
        monkeypatch.setattr(ModelRunner, "ahead", ahead)
        asked: tuple[dict[str, Any], ...] = (
            *({}, {"temperature": 0.0}, {"top_k": 4}),
            {"logprobs": 1, "max_tokens": 3},
        )
        for i, given in enumerate(asked):
            params = SamplingParams(**{"max_tokens": 12, "seed": i} | given)
            rig.submit(unified(f"leg{i}", [i + 1] * (3 + 9 * i), params=params))
        rig.run()
    assert told(rigs[0]) == told(rigs[1])
    assert waits.count("wait") == waits.count("mark") > 5
