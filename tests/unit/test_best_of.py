"""Which samples of each prompt are answered."""

import pytest

from app.generation.best_of import Sample, chosen, mean_logprob
from relay.request import Token


def sample(*logprobs: float | None) -> Sample:
    tokens = [
        Token(position, 7, "x", None if value is None else [[7, value], [8, -0.1]])
        for position, value in enumerate(logprobs)
    ]
    return Sample(tokens, None)


def test_the_mean_is_per_token_and_of_the_chosen_ones() -> None:
    assert mean_logprob(sample(-1.0, -3.0).tokens) == -2.0
    assert mean_logprob(sample(-1.0, None, -3.0).tokens) == -2.0, "Redis may have forgotten some"
    assert mean_logprob([]) == 0.0


@pytest.mark.parametrize(("n", "expected"), [(1, [1, 3]), (2, [1, 2, 3, 5]), (3, [0, 1, 2, 3, 4, 5])])
def test_the_best_of_each_prompt_come_first(n: int, expected: list[int]) -> None:
    """A longer one is not worse for its length."""
    samples = [sample(-2.0), sample(-0.5, -0.5, -0.5), sample(-1.0), sample(-0.1), sample(-9.0), sample(-0.2)]
    assert chosen(samples, of_each_prompt=3, n=n) == expected


def test_equals_stay_in_their_order() -> None:
    assert chosen([sample(-1.0)] * 4, of_each_prompt=4, n=2) == [0, 1]
