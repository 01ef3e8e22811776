"""What one sequence remembers for its sampling: which tokens it has, and what its logits are corrected by."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property

import torch
from llguidance import LLMatcher
from torch import Tensor

from relay.sampling import SamplingParams
from workers.engine.limits import Limits


class SamplingState:
    """A function of (params, prompt ids, output ids): built again on another worker it is the same.

    The scheduler calls `append` with every output token, in order. Token ids outside the vocabulary are
    ignored: they can never be sampled.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        vocab_size: int,
        eos_ids: Iterable[int],
        device: torch.device,
        matcher: LLMatcher | None = None,
    ) -> None:
        """`matcher` belongs to this state, and is at the start of the answer."""
        self._params = params
        self._prompt = prompt_ids
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._device = device
        self._repeats = params.repetition_penalty != 1.0
        self._counts_matter = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._limits = Limits(params, matcher, vocab_size, device)
        self._output: Counter[int] = Counter()  # stays empty when no penalty asks for it
        for token in output_ids:
            self.append(token)

    # Made when they are first needed: a plain row asks nothing of a device that may be busy.

    @cached_property
    def _biased_ids(self) -> Tensor:
        return self._to_tensor(self._params.logit_bias)

    @cached_property
    def _biases(self) -> Tensor:
        biases = [self._params.logit_bias[token] for token in self._biased_ids.tolist()]
        return torch.tensor(biases, dtype=torch.float32, device=self._device)

    @cached_property
    def _end_ids(self) -> Tensor:
        ended_by_eos = self._params.grammar is not None or not self._params.ignore_eos
        return self._to_tensor({*self._params.stop_token_ids, *(self._eos_ids if ended_by_eos else ())})

    @cached_property
    def _unwanted_ids(self) -> Tensor:
        unwanted = self._params.ignore_eos and self._params.grammar is not None
        return self._to_tensor(self._eos_ids if unwanted else ())

    @cached_property
    def _prompt_ids(self) -> Tensor:
        return self._to_tensor(set(self._prompt))

    def _to_tensor(self, ids: Iterable[int]) -> Tensor:
        inside = [token for token in ids if 0 <= token < self._vocab_size]
        return torch.tensor(inside, dtype=torch.int64, device=self._device)

    def append(self, token: int) -> None:
        """Note the next output token."""
        self._limits.append(token)
        if self._repeats or self._counts_matter:
            self._output[token] += 1

    def neutral(self, position: int) -> bool:
        """Whether the logits of this output position stay as they are."""
        penalised = self._repeats or self._counts_matter
        corrected = penalised or self._params.logit_bias or not self._limits.none
        return not corrected and position >= self._params.min_tokens

    def correct(self, logits: Tensor, position: int) -> Tensor:
        """New float32 [vocab]: bias, then the limits and no end before `min_tokens`, then the penalties.

        Repetition (Keskar et al., "CTRL", 2019): divides positive logits of seen tokens, multiplies others.
        Frequency and presence (OpenAI): subtracted per occurrence in the output, and once if there is any.
        """
        params = self._params
        scores = logits.clone()
        scores[self._biased_ids] += self._biases
        self._limits.forbid(scores)
        self._delay_end(scores, position)
        output_ids = torch.tensor(list(self._output), dtype=torch.int64, device=logits.device)
        if self._repeats:
            seen_ids = torch.cat((self._prompt_ids, output_ids))  # what is in both gets the same value twice
            seen = scores[seen_ids]
            penalty = params.repetition_penalty
            scores[seen_ids] = torch.where(seen > 0, seen / penalty, seen * penalty)
        if self._counts_matter:
            counts = torch.tensor(list(self._output.values()), dtype=torch.float32, device=logits.device)
            scores[output_ids] -= params.frequency_penalty * counts + params.presence_penalty
        return scores

    def _delay_end(self, scores: Tensor, position: int) -> None:
        """No end yet. A grammar that allows nothing else has the last word."""
        ids = self._end_ids if position < self._params.min_tokens else self._unwanted_ids
        if not len(ids):
            return
        ends = scores[ids]
        scores[ids] = -torch.inf
        if self._params.grammar is not None and scores.max() == -torch.inf:
            scores[ids] = ends
