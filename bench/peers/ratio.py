"""One system against another: the ratio of medians, and how much it moved from turn to turn."""

from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from bench.peers.turn import Turn


class Ratio(NamedTuple):
    """`ratio` of the medians `ours` and `theirs`; `low` and `high` of the ratios of neighbouring turns."""

    ours: float
    theirs: float
    ratio: float
    low: float
    high: float
    pairs: int

    @classmethod
    def of(cls, ours: Iterable[Turn], theirs: Iterable[Turn], metric: str) -> "Ratio | None":
        """Of turns with the same load. Only turns of the same repetition of a run are compared: a machine is
        not the same an hour later. None: there is no such pair."""
        other = {(turn.run, turn.repetition): turn.numbers.get(metric) for turn in theirs}
        pairs = []
        for turn in ours:
            mine, yours = turn.numbers.get(metric), other.get((turn.run, turn.repetition))
            if mine is not None and yours is not None:
                pairs.append((mine, yours))
        if not pairs:
            return None
        mine, yours = (median(values) for values in zip(*pairs))
        ratios = [a / b for a, b in pairs]
        return cls(mine, yours, mine / yours, min(ratios), max(ratios), len(pairs))
