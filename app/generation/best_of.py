"""Which samples of a prompt are answered."""

from collections.abc import Sequence
from typing import NamedTuple

from relay.request import Token
from relay.tokens import End


class Sample(NamedTuple):
    """`end` None: it has not ended yet."""

    tokens: list[Token]
    end: End | None


def chosen(samples: Sequence[Sample], of_each_prompt: int, n: int) -> list[int]:
    """Indexes of the `n` best of each prompt, best first; in their order if that is all of them."""
    found: list[int] = []
    for first in range(0, len(samples), of_each_prompt):
        indexes = list(range(first, first + of_each_prompt))
        if n < of_each_prompt:
            indexes.sort(key=lambda i: -mean_logprob(samples[i].tokens))
        found += indexes[:n]
    return found


def mean_logprob(tokens: Sequence[Token]) -> float:
    """Log probability per token, as OpenAI ranks them; 0 of a sample without any."""
    known = [token.logprobs[0][1] for token in tokens if token.logprobs]
    return sum(known) / len(known) if known else 0.0
