import pytest

from relay.sampling import SamplingParams
from workers.engine import policy
from workers.engine.messages import Ending
from workers.engine.policy import Verdict


def test_pages_for_rounds_up() -> None:
    assert [policy.pages_for(tokens, 4) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_growth_counts_what_the_last_page_still_holds_and_stops_at_the_limit() -> None:
    assert policy.growth_pages(tokens=6, pages=2, limit_tokens=100, reserve_tokens=2, page_size=4) == 0
    assert policy.growth_pages(tokens=6, pages=2, limit_tokens=100, reserve_tokens=3, page_size=4) == 1
    assert policy.growth_pages(tokens=6, pages=2, limit_tokens=8, reserve_tokens=50, page_size=4) == 0


def test_free_tokens_are_never_negative() -> None:
    assert policy.free_tokens(available_pages=10, growth=3, waiting_pages=2, page_size=4) == 20
    assert policy.free_tokens(available_pages=1, growth=3, waiting_pages=2, page_size=4) == 0


@pytest.mark.parametrize(
    ("pending", "decode_rows", "expected"),
    [
        ([5], 0, [5]),
        ([40], 0, [16]),
        ([6, 40], 0, [6, 8]),  # ten are left: two whole pages
        ([16, 8], 0, [16, 0]),
        ([15, 1, 1], 0, [15, 1, 0]),
        ([40], 3, [12]),
        ([40], 16, [4]),  # decoding never starves prefill
        ([], 5, []),
    ],
)
def test_chunks(pending: list[int], decode_rows: int, expected: list[int]) -> None:
    assert policy.chunks(pending, chunk_tokens=16, decode_rows=decode_rows, page_size=4) == expected


def test_the_victim_is_the_youngest_and_never_the_oldest() -> None:
    assert policy.victim([]) is None
    assert policy.victim([5.0]) is None
    assert policy.victim([5.0, 9.0, 7.0]) == 1
    assert policy.victim([5.0, 5.0]) == 1


def test_solo_requests_take_turns_with_the_others() -> None:
    solo = [False, True, False, True]
    assert [policy.turns(solo, step)[0] for step in range(4)] == [[1], [3], [0, 2], [1]]
    assert policy.turns([True], 7) == [[0]]
    assert policy.turns([], 3) == []


def verdict(token: int, position: int, tokens: int = 50, **params: object) -> Verdict:
    wanted = SamplingParams(**{"max_tokens": 10} | params)  # type: ignore[arg-type]
    return policy.verdict(token, position, tokens, wanted, eos_ids={0}, limit_tokens=100)


def test_what_ends_a_sequence() -> None:
    assert verdict(1, 0) == Verdict(None)
    assert verdict(0, 0) == Verdict(Ending.STOP)
    assert verdict(0, 0, ignore_eos=True) == Verdict(None)
    assert verdict(7, 0, stop_token_ids=(7,)) == Verdict(Ending.STOP, 7)
    assert verdict(0, 0, ignore_eos=True, stop_token_ids=(0,)) == Verdict(Ending.STOP, 0)
    assert verdict(1, 9) == Verdict(Ending.LENGTH)
    assert verdict(0, 9) == Verdict(Ending.STOP)
    assert verdict(1, 3, tokens=100) == Verdict(Ending.LENGTH)


def test_nothing_but_length_ends_a_sequence_before_min_tokens() -> None:
    assert verdict(0, 2, min_tokens=3) == Verdict(None)
    assert verdict(7, 2, min_tokens=3, stop_token_ids=(7,)) == Verdict(None)
    assert verdict(0, 3, min_tokens=3) == Verdict(Ending.STOP)
    assert verdict(0, 2, min_tokens=3, tokens=100) == Verdict(Ending.LENGTH)


def test_a_larger_step_may_take_longer() -> None:
    assert policy.step_seconds(1) < policy.step_seconds(512)


def test_the_pace_is_the_best_of_late() -> None:
    first = policy.pace(0.0, 512, 0.5)
    assert first == 1024
    assert policy.pace(first, 512, 0.25) == 2048
    assert first > policy.pace(first, 512, 5.0) > 512, "one slow step is soon forgotten, not a fast one"


@pytest.mark.parametrize(
    ("left_s", "tokens", "tokens_per_s", "late"),
    [
        (0.0, 1, 0.0, True),
        (-1.0, 1, 1e9, True),
        (1e-6, 10**6, 0.0, False),  # nothing is known yet
        (2.0, 2000, 1000.0, False),
        (2.0, 2001, 1000.0, True),
        (float("inf"), 10**9, 1.0, False),
    ],
)
def test_what_is_too_late(left_s: float, tokens: int, tokens_per_s: float, late: bool) -> None:
    assert policy.too_late(left_s, tokens, tokens_per_s) is late


@pytest.mark.parametrize(
    ("group_layers", "layer_bytes", "least_bytes", "expected"),
    [
        (6, 100, 0, 6),
        (6, 100, 600, 6),
        (6, 100, 601, 7),
        (6, 100, 10_000, 30),
        (99, 100, 0, 30),
    ],
)
def test_layers_go_out_together_until_it_is_worth_a_write(
    group_layers: int, layer_bytes: int, least_bytes: int, expected: int
) -> None:
    assert policy.layers_at_once(30, group_layers, layer_bytes, least_bytes) == expected
