"""Which tokens may come next: allowed ones, bad words, grammars; and that a retry goes on in the same way."""

import json
import re
from functools import lru_cache
from typing import Any

import pytest
import torch
from llguidance import LLParserLimits

from relay.grammar import Grammars, choice_grammar, json_grammar, regex_grammar, rules_grammar
from relay.model_file import default_model_path
from relay.sampling import SamplingParams
from relay.tokenizer import Tokenizer
from workers.engine.limits import banned_ids
from workers.engine.messages import Ending, Sampled
from workers.engine.policy import verdict
from workers.engine.sampler import Sampler, SamplingRow, Unsampleable
from workers.engine.sampling_state import SamplingState

VOCAB = 50_000  # more logits than tokens, as some models have
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    return Tokenizer.load(default_model_path())


@lru_cache(maxsize=1)
def sampler() -> Sampler:
    return Sampler(VOCAB, tokenizer().eos_ids, grammars=Grammars(tokenizer(), VOCAB))


def params(**given: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 64, "seed": 5} | given))


def row(p: SamplingParams, output: list[int], state: SamplingState) -> SamplingRow:
    return SamplingRow(p, (), output, len(output), state)


def answer(p: SamplingParams, limit: int = 400, rebuilt_after: int | None = None, seed: int = 0) -> list[int]:
    """Sampled from random logits until the end; `rebuilt_after` tokens the state is made anew from them."""
    output: list[int] = []
    state = sampler().new_state(p, (), output)
    for position in range(limit):
        if position == rebuilt_after:
            state = sampler().new_state(p, (), output)
        logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed * 1000 + position))
        (sampled,) = sampler().sample(logits, [row(p, output, state)])
        assert isinstance(sampled, Sampled), sampled
        output.append(sampled.token_id)
        state.append(sampled.token_id)
        if verdict(sampled.token_id, position, position, p, tokenizer().eos_ids, 1000).ending is Ending.STOP:
            return output[:-1]
    raise AssertionError(f"no end: {tokenizer().decode(output)!r}")


def text(ids: list[int]) -> str:
    return tokenizer().decode(ids, skip_special_tokens=False)


def test_only_allowed_tokens_are_chosen() -> None:
    p = params(allowed_token_ids=(7, 9, VOCAB + 1))
    state = sampler().new_state(p, (), [])
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    drawn = set()
    for seed in range(30):
        p = params(allowed_token_ids=(7, 9, VOCAB + 1), seed=seed)
        (sampled,) = sampler().sample(logits, [row(p, [], state)])
        assert isinstance(sampled, Sampled)
        drawn.add(sampled.token_id)
    assert drawn == {7, 9}


def test_a_bad_word_is_never_completed() -> None:
    assert banned_ids([(5,), (1, 2, 3), (2, 9)], [0, 1, 2]) == [5, 3, 9]
    assert banned_ids([(1, 2, 3)], [2]) == []
    p = params(bad_words=((5,), (6, 7)), temperature=0.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, [5, 6, 7]] = torch.tensor([9.0, 8.0, 10.0])
    state = sampler().new_state(p, (), [])
    found = []
    for position in range(3):
        (sampled,) = sampler().sample(logits, [row(p, found, state)])
        assert isinstance(sampled, Sampled)
        assert position == len(found)
        found.append(sampled.token_id)
        state.append(sampled.token_id)
    assert found == [7, 7, 7]  # 5 never; 7 is bad only behind 6
    state = sampler().new_state(p, (), [6])
    (sampled,) = sampler().sample(logits, [row(p, [6], state)])
    assert sampled == Sampled(6)


@pytest.mark.parametrize("seed", range(4))
def test_random_logits_make_json_that_follows_the_schema(seed: int) -> None:
    made = json.loads(text(answer(params(grammar=json_grammar(SCHEMA)), seed=seed)))
    assert set(made) == {"name", "age"}
    assert isinstance(made["name"], str)
    assert isinstance(made["age"], int)


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (regex_grammar(r"[a-f]{3}-\d{2}"), r"[a-f]{3}-\d{2}"),
        (choice_grammar(["red", 'a "green" one', "blau é\n"]), 'red|a "green" one|blau é\n'),
        (rules_grammar('root ::= ("ab" | "ba"){3}'), "(ab|ba){3}"),
        (rules_grammar('start: "x" NUMBER\nNUMBER: /[0-9]{2}/'), "x[0-9]{2}"),
    ],
)
def test_every_kind_of_grammar_is_followed(grammar: str, pattern: str) -> None:
    assert re.fullmatch(pattern, text(answer(params(grammar=grammar))))


@pytest.mark.parametrize("after", [1, 3, 8])
def test_a_rebuilt_state_goes_on_where_it_stopped(after: int) -> None:
    p = params(grammar=json_grammar(SCHEMA), bad_words=((11,),), temperature=0.7)
    assert answer(p, rebuilt_after=after) == answer(p)


@pytest.mark.parametrize("more", [{"min_tokens": 60}, {"ignore_eos": True}])
def test_the_end_of_a_grammar_ends_the_answer(more: dict[str, Any]) -> None:
    assert text(answer(params(grammar=choice_grammar(["yes"]), **more))) == "yes"


def test_an_end_waits_while_the_grammar_allows_more() -> None:
    p = params(grammar=regex_grammar("a+"), min_tokens=20)
    assert len(answer(p, limit=5000)) >= 20


def test_what_contradicts_the_grammar_leaves_nothing() -> None:
    p = params(grammar=choice_grammar(["yes"]), allowed_token_ids=(5,))
    state = sampler().new_state(p, (), [])
    (sampled,) = sampler().sample(torch.zeros(1, VOCAB), [row(p, [], state)])
    assert isinstance(sampled, Unsampleable)
    broken = sampler().new_state(params(grammar=choice_grammar(["yes"])), (), [5, 6])
    (sampled,) = sampler().sample(torch.zeros(1, VOCAB), [row(p, [5, 6], broken)])
    assert isinstance(sampled, Unsampleable)


@pytest.mark.parametrize("limit", [{"step_max_items": 3}, {"step_lexer_fuel": 10}])
def test_a_grammar_that_becomes_too_complex_fails_the_answer(
    limit: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not look like one that has ended."""
    monkeypatch.setattr("relay.grammar._LIMITS", LLParserLimits(**limit))
    p = params(grammar=json_grammar(SCHEMA))
    limited = Sampler(VOCAB, tokenizer().eos_ids, grammars=Grammars(tokenizer(), VOCAB))
    state = limited.new_state(p, (), [])
    for token in tokenizer().encode('{"name": "hello", "age": 12}', add_special_tokens=False):
        (sampled,) = sampler().sample(torch.zeros(1, VOCAB), [row(p, [], state)])
        if isinstance(sampled, Unsampleable):
            return
        assert sampled.token_id not in tokenizer().eos_ids
        state.append(token)
    raise AssertionError("the limit was never met")
