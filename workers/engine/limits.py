"""Which tokens may come next, whatever their logits: allowed ones, no bad words, what a grammar allows."""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from relay.sampling import SamplingParams

# What eight bits of a mask, the lowest first, add to eight logits: faster by far than to fill by a mask.
_UNPACKED = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, 0.0, -np.inf).astype(np.float32)


class Limits:
    """A function of (params, output ids), like the sampling state that it is a part of."""

    def __init__(
        self, params: SamplingParams, matcher: LLMatcher | None, vocab_size: int, device: torch.device
    ) -> None:
        """`matcher` at the start of the answer, with a mask of `vocab_size` bits; None: no grammar."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._device = device
        self._bad_words = [word for word in params.bad_words if word[-1] < vocab_size]
        self._last_ids: deque[int] = deque(maxlen=max(map(len, self._bad_words), default=1) - 1)
        self._unlisted = self._all_but(params.allowed_token_ids) if params.allowed_token_ids else None

    @property
    def none(self) -> bool:
        return self._matcher is None and self._unlisted is None and not self._bad_words

    def append(self, token: int) -> None:
        """Note the next output token."""
        self._last_ids.append(token)
        if self._matcher is not None:
            self._matcher.consume_token(token)

    def forbid(self, scores: Tensor) -> None:
        """Set what may not come next in `scores`, float32 [vocab], to minus infinity."""
        if self._unlisted is not None:
            scores += self._unlisted
        if banned := banned_ids(self._bad_words, list(self._last_ids)):
            scores[banned] = -torch.inf
        if self._matcher is not None:
            scores += self._against_grammar(self._matcher)

    def _against_grammar(self, matcher: LLMatcher) -> Tensor:
        """Float32 [vocab], 0 or minus infinity; that for all once the matcher has met an error: a token
        against the grammar, or a limit of its own. It would allow the end of the text then, as if that were
        whole."""
        packed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            return self._all_but(())
        unpacked = _UNPACKED.take(packed, axis=0).reshape(-1)[: self._vocab_size]
        return torch.from_numpy(unpacked).to(self._device)

    def _all_but(self, ids: Iterable[int]) -> Tensor:
        """Float32 [vocab], minus infinity but for these."""
        others = torch.full((self._vocab_size,), -torch.inf, device=self._device)
        others[[token for token in ids if token < self._vocab_size]] = 0.0
        return others


def banned_ids(bad_words: Sequence[Sequence[int]], last_ids: Sequence[int]) -> list[int]:
    """The tokens that would complete a bad word behind `last_ids`."""
    return [word[-1] for word in bad_words if _ends_with(last_ids, word[:-1])]


def _ends_with(ids: Sequence[int], end: Sequence[int]) -> bool:
    return len(end) <= len(ids) and tuple(ids[len(ids) - len(end) :]) == tuple(end)
