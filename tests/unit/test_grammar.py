"""Grammars over tokenizers of other kinds, and what `check` finds wrong."""

import json
import threading

import pytest
import tokenizers
import torch

from relay.grammar import (
    MAX_GRAMMAR_BYTES,
    GrammarError,
    Grammars,
    choice_grammar,
    json_grammar,
    lark_grammar,
    regex_grammar,
    rules_grammar,
)
from relay.sampling import SamplingParams
from relay.tokenizer import Tokenizer
from workers.engine.messages import Sampled
from workers.engine.sampler import Sampler, SamplingRow

SPECIAL = ["<unk>", "<s>", "</s>"]
SCHEMA = {
    "type": "object",
    "properties": {"é": {"type": "string", "minLength": 3, "maxLength": 6}, "日": {"type": "boolean"}},
    "required": ["é", "日"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """SentencePiece's scheme: ▁ for spaces, and bytes for what has no token."""
    words = ["▁", "▁true", "true", "▁{", "{", '"', ":", '":', "▁a", "a"]
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {token: i for i, token in enumerate(tokens)}
    model = tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend, special_tokens={}, eos_ids={2}, chat_template=None)


@pytest.mark.parametrize("seed", range(5))
def test_bytes_and_words_make_json(tokenizer: Tokenizer, seed: int) -> None:
    size = tokenizer.vocab_size + 9
    sampler = Sampler(size, tokenizer.eos_ids, grammars=Grammars(tokenizer, size))
    params, output = SamplingParams(500, seed=seed, grammar=json_grammar(SCHEMA)), list[int]()
    state = sampler.new_state(params, (), output)
    for position in range(500):
        logits = torch.randn(1, size, generator=torch.Generator().manual_seed(1000 * seed + position))
        (sampled,) = sampler.sample(logits, [SamplingRow(params, (), output, position, state)])
        assert isinstance(sampled, Sampled)
        if sampled.token_id == 2:
            break
        output.append(sampled.token_id)
        state.append(sampled.token_id)
    made = json.loads(b"".join(map(tokenizer.token_bytes, output)).decode())
    assert set(made) == {"é", "日"}
    assert 3 <= len(made["é"]) <= 6


def test_what_is_sound_passes(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    for grammar in (
        json_grammar({"type": "object"}),
        json_grammar({"$defs": {"x": {"type": "integer"}}, "$ref": "#/$defs/x"}),
        regex_grammar(r"\d+"),
        choice_grammar(["é\n", '"', "\\"]),
        rules_grammar('root ::= "a" root | "b"'),
        lark_grammar("start: <[1]> /a+/"),
    ):
        grammars.check(grammar)


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        (lark_grammar("start: a\na: a"), None),
        (lark_grammar("start: <[999999]>"), None),
        (regex_grammar("x" * MAX_GRAMMAR_BYTES), "larger than"),
        (json_grammar({"type": "string", "pattern": "((("}), None),
        (json_grammar({"allOf": [{"type": "string"}, {"type": "integer"}]}), None),
    ],
)
def test_what_no_answer_can_follow_is_refused(tokenizer: Tokenizer, grammar: str, told: str | None) -> None:
    with pytest.raises(GrammarError, match=told) as caught:
        Grammars(tokenizer, tokenizer.vocab_size).check(grammar)
    assert 0 < len(str(caught.value)) <= 300
    assert "\n" not in str(caught.value)


def test_a_grammar_is_compiled_by_another_thread(tokenizer: Tokenizer) -> None:
    grammars, grammar, told = (
        Grammars(tokenizer, tokenizer.vocab_size),
        json_grammar(SCHEMA),
        threading.Event(),
    )
    if not grammars.ready(grammar, told.set):
        assert told.wait(30)
    assert grammars.ready(grammar, told.set)
    one, other = grammars.matcher(grammar), grammars.matcher(grammar)
    assert one.try_consume_tokens(tokenizer.encode("{", add_special_tokens=False))
    assert one.compute_bitmask() != other.compute_bitmask(), "each answer has a matcher of its own"
