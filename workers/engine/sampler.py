"""Logits to tokens: greedy, or a draw that depends on nothing but the row's own logits, seed and position."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels import Kernels
from kernels.reference import ReferenceKernels
from relay.grammar import Grammars
from relay.sampling import SamplingParams
from workers.engine.batch_draw import Draw, draw_rows, upload
from workers.engine.host_draw import Floats, Ids, draw_on_host
from workers.engine.messages import Sampled
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
    code: str = "engine_failed"


class DrawnRows(NamedTuple):
    """What a device draws: `ids` int64 [rows], and `found` float64 [rows, 3], of each row the highest logit,
    the highest of what is left to choose from, and the id."""

    ids: Tensor
    found: Tensor


_NOTHING_LEFT = Unsampleable(
    "No token is left to choose: min_tokens, allowed_token_ids, bad_words and the grammar forbid all.",
    "no_token_left",
)


def _broken(peak: float) -> Unsampleable:
    return Unsampleable(f"the highest logit is {peak}: check the weights and their dtype")


class Sampler:
    """Samples a batch, all rows together. On a CPU neighbours cannot change a row's token; on a GPU they can
    change how its sums are rounded."""

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

    def ready(self, params: SamplingParams, then: Callable[[], object]) -> bool:
        """Whether `new_state` answers at once. If not it will, and `then` is called on another thread."""
        if params.grammar is None:
            return True
        assert self._grammars is not None, "this sampler was made without grammars"
        return self._grammars.ready(params.grammar, then)

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
        own_peaks, ids = highest(logits.numpy())
        peaks, scores = own_peaks, self._corrected(logits, rows)
        if scores is not logits:
            peaks, ids = highest(scores.numpy())
        usable = np.isfinite(own_peaks) & np.isfinite(peaks)
        if drawn := [i for i, row in enumerate(rows) if not row.params.greedy and usable[i]]:
            draws = [Draw.of(rows[i].params, rows[i].position) for i in drawn]
            ids[drawn] = draw_on_host(scores.numpy()[drawn], peaks[drawn], draws)
        return [
            self._with_logprobs(logits[i], row, _checked(float(own_peaks[i]), float(peaks[i]), int(ids[i])))
            for i, row in enumerate(rows)
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
        scores = self._corrected(logits, rows)
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

    def _corrected(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """`logits` themselves where no row asks for more."""
        corrected = [i for i, row in enumerate(rows) if not row.state.neutral(row.position)]
        if not corrected:
            return logits
        scores = logits.clone()
        for i in corrected:
            scores[i] = rows[i].state.correct(logits[i], rows[i].position)
        return scores

    def _with_logprobs(
        self, logits: Tensor, row: SamplingRow, choice: Sampled | Unsampleable
    ) -> Sampled | Unsampleable:
        if row.params.logprobs is None or isinstance(choice, Unsampleable):
            return choice
        return Sampled(choice.token_id, token_logprobs(logits, choice.token_id, row.params.logprobs))


def _checked(own_peak: float, peak: float, token: float) -> Sampled | Unsampleable:
    if not math.isfinite(own_peak):
        return _broken(own_peak)
    return Sampled(int(token)) if math.isfinite(peak) else _NOTHING_LEFT


def highest(rows: Floats) -> tuple[Floats, Ids]:
    """The highest of each row, and its index: the lowest of equal ones; NaN when the row holds one.

    On a CPU ten times as fast as torch's.
    """
    best = rows.argmax(axis=-1)
    return rows[np.arange(len(rows)), best], best


def token_logprobs(logits: Tensor, token: int, alternatives: int) -> list[list[float]]:
    """[[id, log probability], ...] under the model's own distribution: before bias, penalties, temperature.

    First the chosen token, then the `alternatives` most likely ones (the chosen may be among them again).
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = [[token, float(logprobs[token])]]
    top = logprobs.topk(min(alternatives, len(logprobs)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return chosen + sorted(([i, value] for i, value in pairs), key=lambda pair: (-pair[1], pair[0]))
