"""The tokens that a step chooses: there at once, or read once its device has drawn them."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from workers.engine.messages import Sampled
from workers.engine.sampler import Sampler, SamplingRow, Unsampleable


class Choice(Protocol):
    """Of the rows of a step that sample, in their order."""

    ids: Tensor | None
    """int64 [R] on the device, for the next step to be launched with; None: nobody knows before `read`."""

    def read(self) -> list[Sampled | Unsampleable]:
        """Wait until the step is over and say what it chose. Its pages may be freed and sent from then on."""
        ...


class LateChoice:
    """Chosen when it is read, with the help of the host."""

    ids: Tensor | None = None

    def __init__(self, sampler: Sampler, logits: Tensor, rows: Sequence[SamplingRow]) -> None:
        self._sampler = sampler
        self._logits = logits
        self._rows = rows

    def read(self) -> list[Sampled | Unsampleable]:
        return self._sampler.sample(self._logits, self._rows) if self._rows else []


class QueuedChoice:
    """Drawn by a GPU as part of the step, and copied to the host behind it."""

    ids: Tensor | None

    def __init__(self, sampler: Sampler, logits: Tensor, rows: Sequence[SamplingRow]) -> None:
        assert not sampler.asks_host(rows)
        self._sampler = sampler
        self._rows = rows
        drawn = sampler.draw_together(logits, rows)
        self.ids = drawn.ids
        self._found = torch.empty_like(drawn.found, device="cpu", pin_memory=bool(rows))
        self._found.copy_(drawn.found, non_blocking=True)
        self._over = torch.cuda.Event()
        self._over.record()

    def read(self) -> list[Sampled | Unsampleable]:
        self._over.synchronize()
        return self._sampler.checked(self._found, self._rows)
