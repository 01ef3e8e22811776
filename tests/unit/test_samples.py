"""Samples of a prompt: what is the same, what differs, and what they are called."""

from app.generation.submit import Accepted
from relay.request import member_id
from relay.sampling import SamplingParams

PARAMS = SamplingParams(max_tokens=5, seed=7, prompt_logprobs=2, stop=("x",))


def test_the_first_sample_is_what_was_asked_for() -> None:
    assert PARAMS.sample(0) is PARAMS


def test_each_other_draws_from_a_seed_of_its_own() -> None:
    seeds = [PARAMS.sample(index).seed for index in range(128)]
    assert len(set(seeds)) == 128
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert seeds == [PARAMS.sample(index).seed for index in range(128)], "after a crash too"
    others = {SamplingParams(max_tokens=5, seed=8).sample(index).seed for index in range(128)}
    assert not others & set(seeds)


def test_nothing_else_differs_but_who_tells_of_the_prompt() -> None:
    other = PARAMS.sample(3)
    assert (other.prompt_logprobs, other.max_tokens, other.stop) == (None, 5, ("x",))


def test_the_requests_of_a_call_follow_from_its_first() -> None:
    accepted = Accepted("req-a", 9, replayed=False, goes_on=False, prompts=2, samples=3)
    assert accepted.request_ids == ("req-a", "req-a-1", "req-a-2", "req-a-3", "req-a-4", "req-a-5")
    assert accepted.leaders == ("req-a", "req-a-3")
    assert accepted.request_ids == tuple(member_id("req-a", index) for index in range(6))
