"""Draws for all rows of a step at once, on a CPU."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from workers.engine.batch_draw import Draw

Floats = NDArray[np.float32]
Ids = NDArray[np.intp]


def draw_on_host(scores: Floats, peaks: Floats, draws: Sequence[Draw]) -> list[int]:
    """A token id for each row of `scores` [n, vocab] with finite maxima `peaks` [n].

    Weights and their sums are computed for all rows at once, with the same result for each as alone; what is
    left of a row after a first look at them is short, unless its draw allows all tokens.
    """
    weights = weigh(scores, peaks, draws)
    masses = weights.sum(axis=1, dtype=np.float64)
    lowest = lowest_weights(draws, masses, scores.shape[1])
    return [draw_one(*row) for row in zip(weights, masses, lowest, draws, strict=True)]


def draw_one(weights: Floats, mass: float, lowest: float, draw: Draw) -> int:
    """The token for a row of weights, whose sum is `mass`."""
    if lowest == 0.0:
        return drawn(weights, draw.u)
    ids = np.flatnonzero(weights >= lowest)
    candidates = weights[ids]
    if draw.top_p < 1.0:
        chosen = np.flatnonzero(candidates >= nucleus_floor(candidates, draw.top_p * mass))
        ids, candidates = ids[chosen], candidates[chosen]
    return int(ids[drawn(candidates, draw.u)])


def weigh(scores: Floats, peaks: Floats, draws: Sequence[Draw]) -> Floats:
    """Weights [n, vocab], proportional to the probabilities at each row's temperature, of what its top-k
    leaves; the heaviest is 1. Equally likely tokens all stay or none, here as in the other filters.
    """
    vocab = scores.shape[1]
    weights = scores - peaks[:, None]
    weights /= np.array([draw.temperature for draw in draws], dtype=np.float32)[:, None]
    np.exp(weights, out=weights)
    for row, draw in enumerate(draws):
        if 0 < draw.top_k < vocab:
            lowest = np.partition(scores[row], vocab - draw.top_k)[vocab - draw.top_k]
            weights[row] *= scores[row] >= lowest
    return weights


def lowest_weights(draws: Sequence[Draw], masses: NDArray[np.float64], vocab: int) -> Floats:
    """Below these weights [n] no token of a row can be drawn; 0 where any can.

    min-p: Nguyen et al., "Turning Up the Heat", 2025. All tokens lighter than (1 - top_p) * mass / vocab
    together weigh less than what top-p cuts off, so they need no sorting.
    """
    cut = np.array([1.0 - draw.top_p for draw in draws]) * masses / vocab
    return np.maximum(cut, [draw.min_p for draw in draws]).astype(np.float32)


def nucleus_floor(weights: Floats, mass: float) -> float:
    """The largest weight that reaches `mass` together with all heavier ones; the smallest if none does.

    Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020.
    """
    descending = np.sort(weights)[::-1]
    reached = int(descending.cumsum(dtype=np.float64).searchsorted(mass))
    return float(descending[min(reached, len(descending) - 1)])


def drawn(weights: Floats, u: float) -> int:
    """The index whose share of the cumulated weight holds `u` in [0, 1): inverse transform sampling."""
    cumulated = (
        torch.from_numpy(weights).cumsum(0, dtype=torch.float64).numpy()
    )  # numpy's takes twice as long
    return int(cumulated.searchsorted(cumulated[-1] * u, side="right"))
