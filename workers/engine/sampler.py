"""Logits to tokens: greedy, or a draw that depends on nothing but the row's own logits, seed and position."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels import Kernels
from kernels.reference import ReferenceKernels
from relay.grammar import Grammars
from relay.sampling import SamplingParams
from workers.engine.batch_draw import Draw, draw_rows, upload
from workers.engine.messages import Sampled
from workers.engine.philox import uniform
from workers.engine.sampling_state import SamplingState


class SamplingRow(NamedTuple):
    """One sequence of the batch. `position` is that of the token to sample, over all attempts, from 0."""

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    position: int
    state: SamplingState


class Unsampleable(NamedTuple):
    """In place of a token: this row's logits allow none. Its request fails, the batch goes on."""

    reason: str


class DrawnRows(NamedTuple):
    """What a device draws: `ids` int64 [rows], and `found` float64 [rows, 3], of each row the highest logit,
    the highest of what is left to choose from, and the id."""

    ids: Tensor
    found: Tensor


_NOTHING_LEFT = Unsampleable(
    "no token is left to choose: min_tokens, allowed_token_ids, bad_words and the grammar forbid all"
)


def _broken(peak: float) -> Unsampleable:
    return Unsampleable(f"the highest logit is {peak}: check the weights and their dtype")


class Sampler:
    """Samples a batch. On a CPU one row at a time, so that its neighbours cannot change a row's token;
    on a GPU together, where they can only change how sums are rounded."""

    def __init__(
        self,
        vocab_size: int,
        eos_ids: Iterable[int],
        device: torch.device | str = "cpu",
        grammars: Grammars | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        """`grammars`: without it no request may have a grammar. `kernels`: what filters on a GPU."""
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._kernels = kernels or ReferenceKernels()
        self._eos_ids = frozenset(eos_ids)
        self._device = torch.device(device)
        self._all_ids = torch.arange(vocab_size, device=self._device)

    def new_state(
        self, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> SamplingState:
        """The state of a sequence that already has these output tokens."""
        matcher = None
        if params.grammar is not None:
            assert self._grammars is not None, "this sampler was made without grammars"
            matcher = self._grammars.matcher(params.grammar)
        return SamplingState(
            params, prompt_ids, output_ids, self._vocab_size, self._eos_ids, self._device, matcher
        )

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[Sampled | Unsampleable]:
        """Choose one token per row of `logits`, float32 [rows, vocab], which is left alone."""
        expected = (len(rows), self._vocab_size)
        assert logits.shape == expected, f"logits are {tuple(logits.shape)}, expected {expected}"
        if not rows:
            return []
        if logits.device.type != "cpu":
            return self.sample_together(logits, rows)
        peaks, best = highest(logits)
        return [
            self._sample_row(logits[i], peak, token, row)
            for i, (peak, token, row) in enumerate(zip(peaks, best, rows, strict=True))
        ]

    def sample_together(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[Sampled | Unsampleable]:
        """As `sample`, all rows at once: what is right on a device that must not be asked row by row. Only
        rows with penalties, biases or logprobs ask by themselves."""
        chosen = self.checked(self.draw_together(logits, rows).found, rows)
        return [
            self._with_logprobs(logits[i], row, choice)
            for i, (row, choice) in enumerate(zip(rows, chosen, strict=True))
        ]

    def asks_host(self, rows: Sequence[SamplingRow]) -> bool:
        """Whether any of these rows needs more than `draw_together` of a device that nobody waits for."""
        return any(row.params.logprobs is not None or not row.state.neutral(row.position) for row in rows)

    def draw_together(self, logits: Tensor, rows: Sequence[SamplingRow]) -> DrawnRows:
        """Without waiting for the device, unless a row `asks_host`. A row that allows no token gets any."""
        scores = logits
        if corrected := [i for i, row in enumerate(rows) if not row.state.neutral(row.position)]:
            scores = logits.clone()
            for i in corrected:
                scores[i] = rows[i].state.correct(logits[i], rows[i].position)
        peaks, ids = scores.max(dim=-1)
        if drawn := [i for i, row in enumerate(rows) if not row.params.greedy]:
            at = upload(torch.tensor(drawn), logits.device)
            draws = [Draw.of(rows[i].params, rows[i].position) for i in drawn]
            ids[at] = draw_rows(self._kernels, scores[at], peaks[at], draws)
        found = torch.stack((logits.amax(dim=-1).double(), peaks.double(), ids.double()), dim=1)
        return DrawnRows(ids, found)

    def checked(self, found: Tensor, rows: Sequence[SamplingRow]) -> list[Sampled | Unsampleable]:
        """What was drawn, without logprobs. `found` is that of `draw_together`, on any device."""
        return [_checked(*values) for values, _ in zip(found.tolist(), rows, strict=True)]

    def _with_logprobs(
        self, logits: Tensor, row: SamplingRow, choice: Sampled | Unsampleable
    ) -> Sampled | Unsampleable:
        if row.params.logprobs is None or isinstance(choice, Unsampleable):
            return choice
        return Sampled(choice.token_id, token_logprobs(logits, choice.token_id, row.params.logprobs))

    def _sample_row(self, logits: Tensor, peak: float, best: int, row: SamplingRow) -> Sampled | Unsampleable:
        params = row.params
        if not math.isfinite(peak):
            return _broken(peak)
        scores, token = logits, best
        if not row.state.neutral(row.position):
            scores = row.state.correct(logits, row.position)
            [peak], [token] = highest(scores[None])
            if not math.isfinite(peak):
                return _NOTHING_LEFT
        if not params.greedy:
            ids, weights = kept(self._all_ids, scores, peak, params)
            token = int(ids[draw(weights, uniform(params.seed, row.position))])
        if params.logprobs is None:
            return Sampled(token)
        return Sampled(token, token_logprobs(logits, token, params.logprobs))


def _checked(own_peak: float, peak: float, token: float) -> Sampled | Unsampleable:
    if not math.isfinite(own_peak):
        return _broken(own_peak)
    return Sampled(int(token)) if math.isfinite(peak) else _NOTHING_LEFT


def highest(logits: Tensor) -> tuple[list[float], list[int]]:
    """On a CPU, the highest logit of each row and its id: the lowest of equal ones; NaN when the row holds
    one."""
    rows = logits.numpy()  # its search is ten times as fast as torch's on a CPU
    best = rows.argmax(axis=-1)
    return rows[np.arange(len(rows)), best].tolist(), best.tolist()


def kept(ids: Tensor, scores: Tensor, peak: float, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The ids and weights that top-k, then top-p (of what top-k kept), then min-p leave, in the given order.

    `ids` int64 [n], `scores` float32 [n] with `peak` as their maximum. The weights are proportional to the
    probabilities at `temperature`; the heaviest is 1. Each filter is a lowest weight, so of equally likely
    tokens all stay or none. top-p: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020;
    min-p: Nguyen et al., "Turning Up the Heat", 2025.
    """
    if 0 < params.top_k < len(ids):
        lowest = float(scores.topk(params.top_k).values[-1])
        ids, scores = _at_least(ids, scores, lowest)
    weights = (scores - peak).div_(params.temperature).exp_()
    if params.top_p < 1.0:
        mass = float(weights.sum(dtype=torch.float64))
        # All tokens lighter than this together weigh less than what top-p cuts off, so they need no sorting.
        ids, weights = _at_least(ids, weights, (1.0 - params.top_p) * mass / len(ids))
        ids, weights = _at_least(ids, weights, nucleus_floor(weights, params.top_p * mass))
    if params.min_p > 0.0:
        ids, weights = _at_least(ids, weights, params.min_p)
    return ids, weights


def nucleus_floor(weights: Tensor, mass: float) -> float:
    """The largest weight that reaches `mass` together with all heavier ones; the smallest if none does."""
    ascending = np.sort(weights.cpu().numpy())  # torch sorts indices too, which takes many times as long
    cumulated = ascending[::-1].cumsum(dtype=np.float64)
    reached = min(int(cumulated.searchsorted(mass)), len(ascending) - 1)
    return float(ascending[len(ascending) - 1 - reached])


def draw(weights: Tensor, u: float) -> int:
    """The index whose share of the cumulated weight holds `u` in [0, 1): inverse transform sampling."""
    cumulated = weights.cumsum(0, dtype=torch.float64)
    target = cumulated[-1] * u
    return int(torch.searchsorted(cumulated, target, right=True))


def token_logprobs(logits: Tensor, token: int, alternatives: int) -> list[list[float]]:
    """[[id, log probability], ...] under the model's own distribution: before bias, penalties, temperature.

    First the chosen token, then the `alternatives` most likely ones (the chosen may be among them again).
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = [[token, float(logprobs[token])]]
    top = logprobs.topk(min(alternatives, len(logprobs)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return chosen + sorted(([i, value] for i, value in pairs), key=lambda pair: (-pair[1], pair[0]))


def _at_least(ids: Tensor, values: Tensor, lowest: float) -> tuple[Tensor, Tensor]:
    chosen = (values >= lowest).nonzero().squeeze(1)
    return ids[chosen], values[chosen]
