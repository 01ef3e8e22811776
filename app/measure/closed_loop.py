"""Clients that ask one thing after the other: a new request whenever one has ended."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from app.measure.completion import Completed


class Seen(NamedTuple):
    """Of each request the seconds to its first token, and all gaps between tokens, in seconds."""

    seconds: float
    tokens: int
    first_s: Sequence[float]
    gaps_s: Sequence[float]


def closed_loop(
    ask: Callable[[list[int]], Completed], prompts: list[list[int]], output_tokens: int, clients: int
) -> Seen:
    """Ask all `prompts`, `clients` of them at once. Raises what `ask` raises, when the others have ended."""
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        done = list(pool.map(ask, prompts))
    return Seen(
        time.perf_counter() - start,
        len(prompts) * output_tokens,  # a server may put several into a chunk
        [each.first_s for each in done],
        [gap for each in done for gap in each.gaps_s],
    )
