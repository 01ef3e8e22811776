"""Marks of prompts: equal beginnings have equal ones, whatever follows, and nobody has another's."""

import itertools
import random

import pytest

from relay.marks import MARK_LETTERS, SHORTEST_TOKENS, marked_tokens, marks
from relay.packed import pack_ints
from relay.request import Submission
from relay.sampling import SamplingParams
from relay.wire import pack_member


def prompt(tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(tokens)]


def marks_of(ids: list[int], whose: str | None = None) -> list[str]:
    found = marks(pack_ints(ids), whose)
    return [found[at : at + MARK_LETTERS] for at in range(0, len(found), MARK_LETTERS)]


def packed_marks(**params: object) -> object:
    sampling = SamplingParams(max_tokens=1, **params)  # type: ignore[arg-type]
    return pack_member(Submission("req", tuple(prompt(300)), sampling, 1_000))[2]


def test_lengths_grow_by_less_than_an_eighth() -> None:
    lengths = [marked_tokens(index) for index in range(100)]
    assert lengths[:9] == [128, 144, 160, 176, 192, 208, 224, 240, 256]
    assert all(a < b <= a * 9 / 8 for a, b in itertools.pairwise(lengths))
    assert lengths[64] == 128 << 8


@pytest.mark.parametrize("tokens", [SHORTEST_TOKENS - 1, SHORTEST_TOKENS, 1_000, 10_000])
def test_each_beginning_that_is_there_has_one(tokens: int) -> None:
    found = marks_of(prompt(tokens))
    assert len(set(found)) == len(found)
    assert all(marked_tokens(index) <= tokens for index in range(len(found)))
    assert marked_tokens(len(found)) > tokens


def test_prompts_share_the_marks_of_what_they_share() -> None:
    begin = prompt(500)
    first, second = marks_of(begin + prompt(500, 1)), marks_of(begin + prompt(900, 2))
    shared = [index for index, (a, b) in enumerate(zip(first, second)) if a == b]
    assert shared == [index for index in range(len(first)) if marked_tokens(index) <= 500]
    assert marked_tokens(len(shared) - 1) > 500 * 8 / 9


def test_nobody_has_the_marks_of_another() -> None:
    whose = [None, "", "a", "b", "\0", "a\0"]
    found = [marks_of(prompt(300), each) for each in whose]
    assert len({mark for each in found for mark in each}) == len(whose) * len(found[0])
    assert marks_of(prompt(300), "a") == found[2]


def test_a_submission_brings_those_of_its_owner() -> None:
    assert packed_marks() == marks(pack_ints(prompt(300)))
    assert packed_marks(cache_salt="a") == marks(pack_ints(prompt(300)), "a")


def test_a_scored_prompt_has_none() -> None:
    """All of it is computed, wherever it goes."""
    assert packed_marks(prompt_logprobs=1) == ""
