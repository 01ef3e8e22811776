"""What a peer is asked to do in one turn, and what was seen of it."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from bench.client import random_prompt


class Load(NamedTuple):
    """A closed loop: `clients` at once until `requests` requests are done. The prompts follow from `seed`."""

    clients: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    seed: int

    @classmethod
    def of(cls, clients: int, prompt_tokens: int, output_tokens: int, seed: int) -> "Load":
        """As many requests as show a steady state, and no more."""
        return cls(clients, min(40, max(10, 3 * clients)), prompt_tokens, output_tokens, seed)

    def prompts(self) -> list[list[int]]:
        rng = random.Random(self.seed)
        return [random_prompt(rng, self.prompt_tokens) for _ in range(self.requests)]


class Steady(NamedTuple):
    """One stream for `seconds` alone, then for as long while a long prompt comes every `every_s`."""

    seconds: float
    long_tokens: int
    every_s: float
    seed: int


class SeenSteady(NamedTuple):
    """Gaps of the steady stream, in seconds."""

    alone_s: Sequence[float]
    disturbed_s: Sequence[float]
