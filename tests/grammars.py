"""The default model's tokenizer, and grammars over its vocabulary, loaded once."""

from functools import cache

from relay.grammar import Grammars
from relay.model_file import default_model_path
from relay.tokenizer import Tokenizer


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(default_model_path())


@cache
def grammars() -> Grammars:
    return Grammars(tokenizer(), tokenizer().vocab_size)
