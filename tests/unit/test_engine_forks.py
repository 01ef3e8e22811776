"""Other samples of a prompt whose KV is in the pool: they hold its whole pages and compute the last one."""

import pytest

from relay.sampling import SamplingParams
from tests.engine_rig import PAGE_SIZE, Relay, Rig, continuation, relayed, unified
from workers.engine.messages import Drop, Prefilled, Reserved
from workers.engine.policy import fork_tokens, pages_for

PROMPT = list(range(1, 12))  # two whole pages and three tokens
WHOLE = len(PROMPT) // PAGE_SIZE


def relay() -> Relay:
    """A leader whose KV has just come into the decode pool."""
    pair = Relay(Rig(), Rig())
    leader = relayed("leader", PROMPT)
    pair.prefill.submit(leader)
    pair.reserve(leader)
    pair.prefill.run()
    pair.finish(leader)
    return pair


def seeded(key: str, seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=8, temperature=1.0, seed=seed, ignore_eos=True)


def test_forks_share_the_pages_of_a_relayed_prompt() -> None:
    pair = relay()
    rig = pair.decode
    rig.submit(unified("one", PROMPT), unified("two", PROMPT))
    rig.step()
    arrived = rig.the(Reserved, "leader").pages
    for fork in ("one", "two"):
        admitted = rig.admitted(fork)
        assert admitted.cached_tokens == WHOLE * PAGE_SIZE
        assert admitted.pages[:WHOLE] == arrived[:WHOLE], "the same pages"
        assert not set(admitted.pages[WHOLE:]) & set(arrived), "but not the one that is written on"
    assert rig.engine.headroom.held_pages == WHOLE + 3 * (pages_for(len(PROMPT) + 1, PAGE_SIZE) - WHOLE)
    rig.run()
    for key in ("leader", "one", "two"):
        assert rig.text(key) == continuation(PROMPT, 8)
    assert rig.engine.stats.prefill_tokens == 2 * (len(PROMPT) - WHOLE * PAGE_SIZE)
    assert pair.prefill.engine.stats.prefill_tokens == len(PROMPT)
    assert rig.engine.headroom.held_pages == 0


def test_forks_share_the_pages_of_a_prompt_computed_here() -> None:
    rig = Rig()
    rig.submit(unified("leader", PROMPT))
    rig.step()
    assert rig.the(Prefilled, "leader").first.token_id == continuation(PROMPT, 1)[0]
    rig.submit(unified("one", PROMPT), unified("two", PROMPT))
    rig.run()
    for key in ("leader", "one", "two"):
        assert rig.text(key) == continuation(PROMPT, 8)
    assert rig.admitted("one").pages[:WHOLE] == rig.admitted("leader").pages[:WHOLE]
    assert rig.engine.stats.prefill_tokens == len(PROMPT) + 2 * (len(PROMPT) - WHOLE * PAGE_SIZE)


def test_a_prompt_of_whole_pages_computes_its_last_one_again() -> None:
    """The logits of its last token choose the next."""
    rig = Rig()
    prompt = PROMPT[: 2 * PAGE_SIZE]
    rig.submit(unified("leader", prompt))
    rig.step()
    rig.submit(unified("one", prompt))
    rig.run()
    assert rig.admitted("one").cached_tokens == PAGE_SIZE
    assert rig.text("one") == rig.text("leader") == continuation(prompt, 8)


@pytest.mark.parametrize("first", ["leader", "one"])
def test_shared_pages_outlive_whoever_ends_first(first: str) -> None:
    rig = relay().decode
    rig.submit(unified("one", PROMPT))
    rig.step()
    rig.submit(Drop(first))
    rig.run()
    other = "one" if first == "leader" else "leader"
    assert rig.text(other) == continuation(PROMPT, 8)
    assert rig.engine.headroom.held_pages == 0


def test_a_fork_that_comes_after_its_leader_ended_finds_the_cache() -> None:
    rig = relay().decode
    rig.run()
    rig.submit(unified("late", PROMPT))
    rig.run()
    assert rig.admitted("late").cached_tokens == WHOLE * PAGE_SIZE
    assert rig.text("late") == continuation(PROMPT, 8)


def test_a_fork_draws_as_if_it_were_alone() -> None:
    pair = Relay(Rig(), Rig())
    leader = relayed("leader", PROMPT, params=seeded("leader", 5))
    pair.prefill.submit(leader)
    pair.reserve(leader)
    pair.prefill.run()
    pair.finish(leader)
    forks = {f"fork-{seed}": seed for seed in (6, 7, 8)}
    pair.decode.submit(*(unified(key, PROMPT, params=seeded(key, seed)) for key, seed in forks.items()))
    pair.decode.run()
    texts = set()
    for key, seed in {"leader": 5, **forks}.items():
        alone = Rig()
        alone.submit(unified("alone", PROMPT, params=seeded(key, seed)))
        alone.run()
        assert pair.decode.text(key) == alone.text("alone")
        texts.add(tuple(pair.decode.text(key)))
    assert len(texts) == 4, "and differently"


def test_a_full_pool_makes_forks_wait_not_fail() -> None:
    rig = Rig(pages=6)
    rig.submit(unified("leader", PROMPT, 4))
    rig.step()
    rig.submit(*(unified(f"fork-{i}", PROMPT, 4) for i in range(4)))
    rig.run()
    for i in range(4):
        assert rig.text(f"fork-{i}") == continuation(PROMPT, 4)
    assert rig.engine.headroom.held_pages == 0


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "reserve_tokens", "pages"),
    [(11, 8, 4, 2), (11, 8, 0, 1), (8, 8, 0, 1), (9, 1, 100, 1), (11, 100, 16, 5), (1, 1, 0, 1)],
)
def test_what_a_fork_needs(prompt_tokens: int, max_tokens: int, reserve_tokens: int, pages: int) -> None:
    assert fork_tokens(prompt_tokens, max_tokens, reserve_tokens, 4) == 4 * pages
