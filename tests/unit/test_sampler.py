"""The sampler against a naive numpy one, against the distributions it claims, and against its own batch."""

import math
import random

import numpy as np
import pytest
import torch

from relay.sampling import SamplingParams
from workers.engine.host_draw import drawn
from workers.engine.messages import Sampled
from workers.engine.philox import uniform
from workers.engine.sampler import Sampler, SamplingRow, Unsampleable

EOS = 2


def params(**given) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 100} | given))


def random_logits(rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def row_of(sampler, given, position=0, prompt=(), output=()) -> SamplingRow:
    return SamplingRow(given, prompt, output, position, sampler.new_state(given, prompt, output))


def sample_one(logits, given, position=0, prompt=(), output=()):
    logits = torch.as_tensor(logits, dtype=torch.float32).reshape(1, -1)
    sampler = Sampler(logits.shape[1], [EOS])
    return sampler.sample(logits, [row_of(sampler, given, position, prompt, output)])[0]


def naive_probabilities(logits, p: SamplingParams, position, prompt, output) -> np.ndarray:
    """One token at a time, in float64, from the definitions."""
    scores = [float(x) for x in logits]
    for token, bias in p.logit_bias.items():
        scores[token] += bias
    if position < p.min_tokens:
        for token in {*p.stop_token_ids, *([] if p.ignore_eos else [EOS])}:
            scores[token] = -math.inf
    for token in {*prompt, *output}:
        scores[token] *= 1 / p.repetition_penalty if scores[token] > 0 else p.repetition_penalty
    for token in set(output):
        scores[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    if p.greedy:
        return np.eye(len(scores))[int(np.argmax(scores))]
    scaled = np.array(scores) / p.temperature
    weights = np.exp(scaled - scaled.max())
    kept = np.ones(len(weights), bool)
    if 0 < p.top_k < len(weights):
        kept &= weights >= sorted(weights)[-p.top_k]
    total = weights[kept].sum()
    heavier = np.array([weights[kept & (weights > weight)].sum() for weight in weights])
    kept &= (heavier < p.top_p * total) | (weights == weights.max())
    kept &= weights >= p.min_p
    weights[~kept] = 0.0
    return weights / weights.sum()


def naive_token(probabilities: np.ndarray, u: float) -> tuple[int, float]:
    """The token of the inverse CDF, and how far `u` is from its nearer border."""
    borders = np.concatenate(([0.0], np.cumsum(probabilities)))
    token = int(np.flatnonzero(borders[1:] > u * borders[-1])[0])
    return token, float(np.abs(borders[1:-1] - u).min())


CASES = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 2.0},
    "cold": {"temperature": 2e-5},
    "top_k": {"top_k": 5},
    "top_k_one": {"top_k": 1},
    "top_k_above_vocab": {"top_k": 10_000},
    "top_p": {"top_p": 0.8},
    "top_p_tiny": {"top_p": 1e-9},
    "top_p_nearly_one": {"top_p": 0.999999},
    "min_p": {"min_p": 0.1},
    "min_p_one": {"min_p": 1.0},
    "all_filters": {"temperature": 1.3, "top_k": 20, "top_p": 0.7, "min_p": 0.05},
    "repetition": {"repetition_penalty": 1.5},
    "repetition_below_one": {"repetition_penalty": 0.7, "temperature": 0.0},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "negative_penalties": {"frequency_penalty": -0.8, "presence_penalty": -1.0, "temperature": 0.0},
    "bias": {"logit_bias": {4: 5.0, 9: -100.0}},
    "min_tokens": {"min_tokens": 50, "stop_token_ids": (5, 6)},
    "min_tokens_ignoring_eos": {"min_tokens": 50, "stop_token_ids": (5,), "ignore_eos": True},
    "everything": {
        "temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {1: 2.0}, "min_tokens": 50,
    },
}  # fmt: skip


@pytest.mark.parametrize("vocab", [61, 257])
@pytest.mark.parametrize("case", CASES)
def test_equals_a_naive_sampler(case, vocab):
    p = params(seed=11, **CASES[case])
    dice = random.Random(case)
    compared = 0
    for position in range(40):
        logits = random_logits(1, vocab, seed=position)[0]
        prompt = dice.choices(range(vocab), k=12)
        output = dice.choices(range(vocab), k=position)
        probabilities = naive_probabilities(logits, p, position, prompt, output)
        token, margin = naive_token(probabilities, uniform(p.seed, position))
        if margin < 1e-5:  # the float32 exponential may fall on the other side
            continue
        assert sample_one(logits, p, position, prompt, output).token_id == token
        compared += 1
    assert compared >= 38


@pytest.mark.parametrize("given", [{}, {"temperature": 0.5}, {"top_k": 6}, {"top_p": 0.6}, {"min_p": 0.2}])
def test_draws_follow_the_distribution(given):
    """Chi-square with at most 15 degrees of freedom: chance exceeds 50 for less than one of 40,000 seeds."""
    draws = 4_000
    p = params(seed=5, **given)
    logits = random_logits(1, 16, seed=3, spread=1.0)
    sampler = Sampler(16, [EOS])
    rows = [row_of(sampler, p, position) for position in range(draws)]
    tokens = [sampled.token_id for sampled in sampler.sample(logits.expand(draws, -1), rows)]
    expected = naive_probabilities(logits[0], p, 0, [], []) * draws
    counted = np.bincount(tokens, minlength=16)
    assert not counted[expected == 0].any()
    possible = expected > 0
    assert possible.sum() > 2
    assert (((counted - expected) ** 2)[possible] / expected[possible]).sum() < 50


def test_a_draw_on_a_border_takes_a_token_that_is_possible():
    assert drawn(np.array([0.0, 1.0, 1.0], dtype=np.float32), 0.0) == 1
    assert drawn(np.array([1.0, 0.0, 1.0], dtype=np.float32), 0.5) == 2
    assert drawn(np.array([1.0, 1.0, 0.0], dtype=np.float32), 1.0 - 2.0**-53) == 1


def test_neighbours_do_not_change_a_row():
    vocab = 40_001
    sampler = Sampler(vocab, [EOS])
    logits = random_logits(len(CASES), vocab)
    rows = [
        row_of(sampler, params(seed=i, logprobs=3, **given), i, prompt=(7, 8, 9), output=(9, 9, 11)[: i % 4])
        for i, given in enumerate(CASES.values())
    ]
    together = sampler.sample(logits, rows)
    order = random.Random(0).sample(range(len(rows)), len(rows))
    shuffled = sampler.sample(logits[order], [rows[i] for i in order])
    assert [shuffled[order.index(i)] for i in range(len(rows))] == together
    assert [sampler.sample(logits[i : i + 1], [rows[i]])[0] for i in range(len(rows))] == together
    elsewhere = Sampler(vocab, [EOS])
    assert elsewhere.sample(logits, rows) == together


def test_seed_and_position_choose_the_token():
    logits = torch.zeros(1_000)
    tokens = [[sample_one(logits, params(seed=s), position=q).token_id for q in range(20)] for s in range(20)]
    assert len({tuple(row) for row in tokens}) == 20
    assert len(set(tokens[0])) > 15
    assert tokens[3] == [sample_one(logits, params(seed=3), position=q).token_id for q in range(20)]


def test_state_grown_by_append_equals_one_built_anew():
    p = params(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, temperature=0.0)
    sampler = Sampler(64, [EOS])
    output = random.Random(1).choices(range(64), k=40)
    grown = sampler.new_state(p, [1, 2, 3], output[:7])
    for token in output[7:]:
        grown.append(token)
    logits = random_logits(1, 64)[0]
    assert torch.equal(grown.correct(logits, 40), sampler.new_state(p, [1, 2, 3], output).correct(logits, 40))


def test_logits_are_left_alone():
    logits = random_logits(2, 50)
    before = logits.clone()
    sampler = Sampler(50, [EOS])
    p = params(logit_bias={1: 3.0}, min_tokens=3, repetition_penalty=2.0, frequency_penalty=1.0, logprobs=2)
    sampler.sample(logits, [row_of(sampler, p, prompt=(1, 2), output=(3,))] * 2)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab", [5, 49_152, 151_937])
@pytest.mark.parametrize("given", [{"temperature": 0.0}, {"temperature": 0.0, "logit_bias": {3: 0.0}}])
def test_greedy_takes_the_lowest_of_equal_ids(vocab, given):
    logits = torch.zeros(vocab)
    logits[[vocab - 1, vocab // 2, 2]] = 4.0
    assert sample_one(logits, params(**given)).token_id == 2


def test_equally_likely_tokens_stay_together():
    tied = torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0])
    for given in ({"top_k": 1}, {"top_k": 2}, {"top_p": 0.01}, {"min_p": 1.0}):
        tokens = {sample_one(tied, params(seed=1, **given), position=i).token_id for i in range(60)}
        assert tokens == {1, 2, 3}, given


def test_temperature_close_to_zero_is_greedy():
    logits = random_logits(1, 500)[0]
    best = int(logits.argmax())
    for temperature in (0.0, 1e-6, 1.1e-5, 1e-3):
        p = params(temperature=temperature)
        assert {sample_one(logits, p, position=i).token_id for i in range(20)} == {best}


def test_no_end_before_min_tokens():
    logits = torch.zeros(8)
    logits[EOS], logits[5] = 50.0, 49.0
    p = params(temperature=0.0, min_tokens=3, stop_token_ids=(5, 1_000_000))
    assert [sample_one(logits, p, position=i).token_id for i in range(5)] == [0, 0, 0, EOS, EOS]


def test_logprobs_are_of_the_model_itself():
    logits = random_logits(1, 30)[0]
    p = params(temperature=0.3, top_k=2, logit_bias={17: 100.0}, presence_penalty=2.0, logprobs=4)
    sampled = sample_one(logits, p, output=(17, 3))
    expected = logits.double().log_softmax(0)
    ids, values = zip(*sampled.logprobs)
    assert sampled.token_id == 17
    assert ids == (17, *expected.argsort(descending=True)[:4].tolist())
    assert values == pytest.approx([float(expected[i]) for i in ids], abs=1e-5)


def test_how_many_logprobs():
    logits = random_logits(1, 6)[0]
    assert sample_one(logits, params()).logprobs is None
    assert len(sample_one(logits, params(logprobs=0)).logprobs) == 1
    assert len(sample_one(logits, params(logprobs=20)).logprobs) == 7


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_row_spares_the_others(bad):
    logits = random_logits(3, 100)
    logits[1, 42] = bad
    sampler = Sampler(100, [EOS])
    for given in ({"temperature": 0.0}, {"top_p": 0.9, "logprobs": 1}):
        good, broken, also_good = sampler.sample(logits, [row_of(sampler, params(**given))] * 3)
        assert isinstance(good, Sampled)
        assert isinstance(also_good, Sampled)
        assert isinstance(broken, Unsampleable)


def test_a_row_without_any_allowed_token():
    only_ends = torch.full((4,), -math.inf)
    only_ends[EOS] = 1.0
    assert isinstance(sample_one(only_ends, params(min_tokens=2)), Unsampleable)
    assert sample_one(only_ends, params()).token_id == EOS


def test_an_empty_batch():
    assert Sampler(10, [EOS]).sample(torch.empty(0, 10), []) == []


def random_params(rng: random.Random) -> SamplingParams:
    return params(
        temperature=rng.choice([0.0, 0.3, 1.0, 1.7]),
        top_k=rng.choice([0, 0, 1, 5, 1000]),
        top_p=rng.choice([1.0, 0.95, 0.5, 0.01]),
        min_p=rng.choice([0.0, 0.0, 0.1, 1.0]),
        min_tokens=rng.choice([0, 0, 5]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        frequency_penalty=rng.choice([0.0, 0.4]),
        logit_bias=rng.choice([{}, {3: 2.0, 7: -100.0}]),
        logprobs=rng.choice([None, None, 3]),
        seed=rng.randrange(1 << 40),
    )


@pytest.mark.parametrize("seed", range(30))
def test_rows_sampled_together_are_those_sampled_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    vocab, count = rng.choice([(40, 30), (997, 8)])
    logits = random_logits(count, vocab, seed)
    logits[::3] = logits[::3].round()  # ties: all stay or none
    if count > 4:
        logits[4, 5] = rng.choice([math.nan, math.inf, 0.0])
    sampler = Sampler(vocab, [EOS])
    prompt, output = tuple(rng.choices(range(vocab), k=9)), tuple(rng.choices(range(vocab), k=4))
    rows = [row_of(sampler, random_params(rng), 4, prompt, output) for _ in range(count)]
    assert sampler.sample_together(logits, rows) == sampler.sample(logits, rows)


def test_together_a_row_with_nothing_left_is_told() -> None:
    sampler = Sampler(3, [EOS])
    given = params(min_tokens=9, stop_token_ids=(0, 1))
    assert isinstance(sampler.sample_together(random_logits(1, 3), [row_of(sampler, given)])[0], Unsampleable)
