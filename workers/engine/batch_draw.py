"""Draws for all rows of a step at once, without waiting for the device that holds their logits."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import Kernels
from relay.sampling import SamplingParams
from workers.engine.philox import uniform


class Draw(NamedTuple):
    """What one row is drawn by; `u` in [0, 1) decides."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    u: float

    @classmethod
    def of(cls, params: SamplingParams, position: int) -> "Draw":
        u = uniform(params.seed, position)
        return cls(params.temperature, params.top_k, params.top_p, params.min_p, u)


def draw_rows(kernels: Kernels, scores: Tensor, peaks: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Token ids int64 [n] for `scores` float32 [n, vocab] with maxima `peaks` [n].

    The same as `host_draw.draw_on_host`, but for how sums are rounded. A row that holds NaN gets any id.
    """
    vocab = scores.shape[1]
    given = upload(torch.tensor(draws, dtype=torch.float64), scores.device)
    temperature, top_k, top_p, min_p, u = given.unbind(1)
    if any(0 < draw.top_k < vocab for draw in draws):
        scores = kernels.top_k(scores, torch.where(top_k > 0, top_k, vocab).clamp_(max=vocab).int())
    weights = ((scores - peaks[:, None]) / temperature[:, None].float()).exp()
    if any(draw.top_p < 1.0 for draw in draws):
        kept = kernels.top_p(weights, top_p) > 0.0
        weights = weights * (kept | (top_p >= 1.0)[:, None])
    weights = weights * (weights >= min_p[:, None])
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    drawn = torch.searchsorted(cumulated, u[:, None] * cumulated[:, -1:], right=True)
    return drawn.clamp_(max=vocab - 1).squeeze(1)


def upload(host: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
