"""Grammars that answers must follow, checked by the gateway and followed by workers, by llguidance.

A grammar is a text in llguidance's own form, made here from what clients send, and carried in the request.
"""

import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from relay.tokenizer import Tokenizer

MAX_GRAMMAR_BYTES = 64 << 10
# A space, or a new line with its indentation: small models that may write any whitespace write it for ever.
JSON_SPACE = r"\x20|\n[\x20\t]{0,40}"
_JSON_STYLE: Any = {"whitespace_flexible": True, "whitespace_pattern": JSON_SPACE}
_SOUND = 256  # grammars that are not compiled again to be checked
_COMPILED = 64  # and to be followed
# A step of a matcher takes some ms at most, and its automaton some tens of MB.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, max_lexer_states=20_000, verbose_errors=False
)


class GrammarError(ValueError):
    """No answer can be made to follow this grammar; the message says what is wrong with it."""


def json_grammar(schema: dict[str, Any]) -> str:
    """Of the JSON texts that are valid by `schema`. Raises GrammarError."""
    try:
        return LLMatcher.grammar_from_json_schema(schema, defaults=_JSON_STYLE)
    except ValueError as error:
        raise GrammarError(_short(str(error))) from error


def regex_grammar(pattern: str) -> str:
    """Of the texts that match `pattern` as a whole, in the syntax of Rust's regex."""
    return LLMatcher.grammar_from_regex(pattern)


def choice_grammar(choices: Sequence[str]) -> str:
    """Of these texts."""
    alternatives = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return LLMatcher.grammar_from_lark(f"start: {alternatives}")


def rules_grammar(rules: str) -> str:
    """Of the texts of a grammar in Lark's syntax or in GBNF, llama.cpp's EBNF. Raises GrammarError."""
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(rules))
    except Exception as error:  # what converts GBNF raises also plain ones
        raise GrammarError(_short(str(error))) from error


def lark_grammar(rules: str) -> str:
    """Of the texts of a grammar in llguidance's own syntax, which is Lark's and more."""
    return LLMatcher.grammar_from_lark(rules)


def json_rule(schema: Any) -> str:
    """The same texts, as a part of a `lark_grammar`. What is no schema is refused when that is checked."""
    style = {"x-guidance": _JSON_STYLE}
    return f"%json {json.dumps(schema | style if isinstance(schema, dict) else schema)}"


class Grammars:
    """Compiles grammars over one model's tokens, which are indexed when the first one comes.

    Threads may share it, though not a matcher.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size` counts logits: there may be more of them than tokens."""
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._checked = lru_cache(maxsize=_SOUND)(self._check)
        self._compiling = lru_cache(maxsize=_COMPILED)(self._compile_apart)
        self._compiler = ThreadPoolExecutor(1, "grammar")

    def warm_up(self) -> None:
        """Index the tokens now, which takes some tenths of a second."""
        assert self._tokens.vocab_size == self.vocab_size

    def ready(self, grammar: str, then: Callable[[], object]) -> bool:
        """Whether `matcher` answers at once. If not another thread compiles the grammar, and calls `then`."""
        compiling = self._compiling(grammar)
        if not compiling.done():
            compiling.add_done_callback(lambda _: then())
        return compiling.done()

    def matcher(self, grammar: str) -> LLMatcher:
        """At the start of an answer. A grammar that never passed `check` may give one in a state of error."""
        return self._compiling(grammar).result().deep_copy()

    def check(self, grammar: str) -> bytes:
        """A bit for each token that may come first. Raises GrammarError unless the grammar compiles within
        bounds of size and time, and has a text."""
        return self._checked(grammar)

    def _compile_apart(self, grammar: str) -> Future[LLMatcher]:
        return self._compiler.submit(self._compile, grammar)

    def _compile(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._tokens, grammar, log_level=0, limits=_LIMITS)

    def _check(self, grammar: str) -> bytes:
        if len(grammar) > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"the grammar is larger than {MAX_GRAMMAR_BYTES} bytes")
        wrong, told = LLMatcher.validate_grammar_with_warnings(grammar, self._tokens, limits=_LIMITS)
        if wrong:
            raise GrammarError(_short(told[0]))
        matcher = self._compile(grammar)
        mask = matcher.compute_bitmask() if not matcher.is_error() else b""
        if matcher.is_error():
            raise GrammarError(_short(matcher.get_error()))
        if not any(mask):
            raise GrammarError("no text follows the grammar")
        return mask

    @cached_property
    def _tokens(self) -> LLTokenizer:
        tokens = TokenizerWrapper(_Tokens(self._tokenizer, self.vocab_size))
        return LLTokenizer(tokens, eos_token=sorted(self._tokenizer.eos_ids))


class _Tokens:
    """The tokenizer in the form that llguidance asks for."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.eos_token_id = min(tokenizer.eos_ids, default=0)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _short(told: str) -> str:
    """What is wrong, without what repeats the grammar around it, or counts lines that no client wrote."""
    lines = told.strip().splitlines()
    found = next((line for line in lines if line.startswith("error: ")), lines[0])
    return re.sub(r"^at \d+\(\d+\): failed to compile JSON schema: ", "", found)[:300]
