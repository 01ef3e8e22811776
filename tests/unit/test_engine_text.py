"""However the engine comes to a text, it is the text of the prompt."""

import random

import pytest
import torch

from relay.sampling import SamplingParams
from tests.engine_rig import EOS, PAGE_SIZE, VOCAB, Relay, Rig, continuation, relayed, unified, work
from workers.engine.messages import (
    Computed,
    Ending,
    Prebuilt,
    Produced,
    Reserve,
    Retracted,
    Sampled,
)


@pytest.fixture(autouse=True, params=[False, True], ids=["at once", "late"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rig, "late", request.param)


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1, VOCAB) for _ in range(tokens)]


@pytest.mark.parametrize("chunk_tokens", [4, 7, 16, 1000])
@pytest.mark.parametrize("tokens", [1, 4, 21, 32])
def test_chunks_do_not_change_the_text(chunk_tokens: int, tokens: int) -> None:
    rig = Rig(chunk_tokens=chunk_tokens)
    rig.submit(unified("a", prompt_of(tokens)))
    rig.run()
    assert rig.text("a") == continuation(prompt_of(tokens), 8)
    assert rig.produced[-1].ending == Ending.LENGTH


def test_neighbours_do_not_change_the_text() -> None:
    rig = Rig()
    prompts = {f"leg{i}": prompt_of(3 + 5 * i, seed=i) for i in range(6)}
    rig.submit(*(unified(key, prompt, tokens=9) for key, prompt in prompts.items()))
    rig.run()
    assert max(rig.model.batch_sizes) > 3
    for key, prompt in prompts.items():
        assert rig.text(key) == continuation(prompt, 9)


def test_emitted_tokens_are_continued_not_repeated() -> None:
    whole = continuation(prompt_of(10), 8)
    rig = Rig()
    rig.submit(unified("a", prompt_of(10), emitted=tuple(whole[:3])))
    rig.run()
    assert rig.text("a") == whole[3:]
    assert rig.produced[0].position == 3


def test_a_cached_prefix_is_used_and_does_not_change_the_text() -> None:
    rig, prompt = Rig(), prompt_of(14)
    rig.submit(unified("a", prompt))
    rig.run()
    rig.submit(unified("b", prompt), unified("c", [*prompt[:9], *prompt_of(6, seed=1)]))
    rig.run()
    assert rig.admitted("b").cached_tokens == 12
    assert rig.admitted("c").cached_tokens == 8
    assert rig.text("b") == continuation(prompt, 8)
    assert rig.text("c") == continuation([*prompt[:9], *prompt_of(6, seed=1)], 8)


def test_at_least_one_token_is_computed() -> None:
    rig, prompt = Rig(), prompt_of(3 * PAGE_SIZE)
    rig.submit(unified("a", prompt))
    rig.run()
    rig.submit(unified("b", prompt))
    rig.run()
    assert rig.admitted("b").cached_tokens == 2 * PAGE_SIZE
    assert rig.text("b") == rig.text("a")


def test_how_a_prompt_was_computed_is_told_with_its_first_token() -> None:
    rig, prompt = Rig(), prompt_of(14)
    for key, cached_tokens in (("a", 0), ("b", 12)):
        rig.submit(unified(key, prompt))
        rig.run()
        first, *others = (produced for produced in rig.produced if produced.key == key)
        assert first.prompted is not None
        assert first.prompted.cached_tokens == cached_tokens
        assert sum(chunk.amount for chunk in first.prompted.chunks) == 14 - cached_tokens
        moments = [moment for chunk in first.prompted.chunks for moment in chunk[:2]]
        assert moments == sorted(moments)
        assert {produced.prompted for produced in others} == {None}


def test_output_tokens_are_cached_too() -> None:
    """The next turn of a chat starts with the last one's answer."""
    rig, prompt = Rig(), prompt_of(10)
    rig.submit(unified("a", prompt))
    rig.run()
    turn = [*prompt, *rig.text("a"), 5, 6]
    rig.submit(unified("b", turn))
    rig.run()
    # The last sampled token has no KV, so the page it ends is not whole.
    assert rig.admitted("b").cached_tokens == (len(prompt) + 8 - 1) // PAGE_SIZE * PAGE_SIZE
    assert rig.text("b") == continuation(turn, 8)


def test_a_prefix_that_is_still_being_used_is_shared() -> None:
    rig, prompt = Rig(), prompt_of(40)
    rig.submit(unified("a", prompt, tokens=20))
    while not rig.produced:
        rig.step()
    rig.submit(unified("b", prompt))
    rig.run()
    assert rig.admitted("b").cached_tokens == 36
    assert rig.admitted("b").pages[:9] == rig.admitted("a").pages[:9]
    assert (rig.text("a"), rig.text("b")) == (continuation(prompt, 20), continuation(prompt, 8))


def test_solo_work_is_alone_in_its_steps() -> None:
    rig = Rig()
    rig.submit(*(unified(f"leg{i}", prompt_of(6, seed=i), solo=i == 1) for i in range(3)))
    rig.run()
    assert sorted(rig.model.batch_sizes) == [1] * 8 + [2] * 8
    for i in range(3):
        assert rig.text(f"leg{i}") == continuation(prompt_of(6, seed=i), 8)


@pytest.mark.parametrize("chunk_tokens", [4, 16, 1000])
def test_relayed_pages_give_the_text_of_a_unified_worker(chunk_tokens: int) -> None:
    relay = Relay(Rig(chunk_tokens=chunk_tokens), Rig(pages=80))
    for turn in range(2):  # the second time with a cached prefix
        legs = [relayed(f"{turn}-{i}", prompt_of(5 + 8 * i, seed=i)) for i in range(3)]
        for leg in legs:
            relay.reserve(leg)
            relay.prefill.submit(leg)
        relay.prefill.run()
        for leg in legs:
            relay.finish(leg)
        relay.prefill.run()
        relay.decode.run()
        for leg in legs:
            assert relay.decode.text(leg.work.key) == continuation(list(leg.work.prompt_ids), 8)
            assert relay.decode.produced[-1].ending == Ending.LENGTH
    assert relay.prefill.admitted("1-2").cached_tokens == 20
    assert relay.prefill.engine.headroom.held_pages == 0
    assert relay.decode.engine.headroom.held_pages == 0


def test_every_layer_of_every_page_is_announced_once_and_in_order() -> None:
    rig, prompt = Rig(chunk_tokens=8, group_layers=2), prompt_of(21)
    rig.submit(relayed("a", prompt))
    rig.run()
    assert [part._replace(ready=None) for part in rig.computed] == [
        Computed("a", first, last, page, page + pages)
        for page, pages in ((0, 2), (2, 2), (4, 2))
        for first, last in ((0, 2), (2, 3))
    ]
    assert rig.produced == []
    assert rig.engine.headroom.held_pages == 6  # until Drop


def test_a_relayed_leg_that_failed_after_some_tokens_is_prefilled_with_them() -> None:
    prompt, emitted = prompt_of(9), tuple(continuation(prompt_of(9), 4))
    relay = Relay(Rig(), Rig(pages=80))
    leg = relayed("a", prompt, emitted=emitted)
    relay.reserve(leg)
    relay.prefill.submit(leg)
    relay.prefill.run()
    relay.finish(leg)
    relay.decode.run()
    assert [*emitted, *relay.decode.text("a")] == continuation(prompt, 8)
    assert relay.decode.produced[0].position == 4
    assert relay.decode.engine.stats.steps == 3  # of its four tokens the first came with the KV


@pytest.mark.parametrize(
    ("token", "max_tokens", "ending"), [(EOS, 5, Ending.STOP), (3, 1, Ending.LENGTH), (3, 5, None)]
)
def test_a_prebuilt_first_token_is_told_before_the_next_step_and_may_be_the_last(
    token: int, max_tokens: int, ending: Ending | None
) -> None:
    rig = Rig()
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    rig.submit(Reserve(work("a", prompt_of(6), params=params)))
    rig.step()
    rig.submit(Prebuilt("a", Sampled(token, [[token, -0.5]])))
    rig.step()
    assert rig.told_at_step[0] == 0
    assert rig.produced[0] == Produced("a", 0, Sampled(token, [[token, -0.5]]), ending)
    assert (rig.engine.headroom.held_pages == 0) == (ending is not None)


def test_a_retracted_leg_resumes_with_the_same_text() -> None:
    """Four legs outgrow a pool of twelve pages; whoever is retracted comes again with what it has."""
    rig = Rig(pages=12, reserve_tokens=1)
    prompts = {f"leg{i}": prompt_of(7, seed=i) for i in range(4)}
    got: dict[str, list[int]] = {key: [] for key in prompts}
    for i, (key, prompt) in enumerate(prompts.items()):
        rig.submit(unified(key, prompt, tokens=24, arrival_ms=float(i)))
    retracted: list[str] = []
    for attempt in range(50):
        rig.run()
        for produced in rig.produced:
            got[produced.key.split("/")[0]].append(produced.sampled.token_id)
        again = [event.key for event in rig.events if isinstance(event, Retracted)]
        rig.produced.clear()
        rig.events.clear()
        if not again:
            break
        retracted += again
        for key in again:
            leg = key.split("/")[0]
            rig.submit(
                unified(
                    f"{leg}/{attempt}",
                    prompts[leg],
                    tokens=24,
                    emitted=tuple(got[leg]),
                    arrival_ms=float(leg[-1]),
                )
            )
    assert retracted
    assert not any(key.startswith("leg0") for key in retracted), "the oldest was retracted"
    for key, prompt in prompts.items():
        assert got[key] == continuation(prompt, 24)


def test_sampled_text_does_not_depend_on_the_batch() -> None:
    """Draws depend on seed and position alone; penalties on the leg's own tokens."""
    params = SamplingParams(max_tokens=10, temperature=0.8, seed=4, repetition_penalty=1.3, ignore_eos=True)
    alone, crowd = Rig(), Rig()
    alone.submit(unified("a", prompt_of(9), params=params))
    crowd.submit(*(unified(f"leg{i}", prompt_of(4 + i, seed=i)) for i in range(3)))
    crowd.submit(unified("a", prompt_of(9), params=params))
    alone.run()
    crowd.run()
    assert alone.text("a") == crowd.text("a")


def test_the_pool_is_zeroed_and_starts_at_a_huge_page() -> None:
    rig = Rig()
    assert rig.kv.address % (2 << 20) == 0
    assert rig.kv.size_bytes == rig.kv.tensor.nbytes
    assert not torch.any(rig.kv.tensor)
