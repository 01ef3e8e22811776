"""Runs the model over a batch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.base import Plan
from workers.engine import policy
from workers.engine.batch import Batch, Drawn, Row
from workers.engine.choice import Choice, LateChoice, QueuedChoice
from workers.engine.kv_pool import KVPool
from workers.engine.messages import Ready
from workers.engine.sampler import Sampler, SamplingRow
from workers.models.model import Model

OnLayers = Callable[[int, int, Ready | None], None]


class ModelRunner:
    """A model and the KV pool that it reads and writes."""

    def __init__(self, model: Model, kv: KVPool, group_layers: int, group_bytes: int = 0) -> None:
        self.kv = kv
        self._model = model
        self._group_layers = group_layers
        self._group_bytes = group_bytes

    @property
    def ahead(self) -> int:
        """How many steps may be launched while one is computed. On a CPU none: a launch computes the step."""
        return 1 if self.kv.tensor.is_cuda else 0

    def prepare(self, rows: Sequence[Row], drawn: Drawn | None = None) -> tuple[Batch, Plan]:
        """What `forward` needs for these rows; `drawn` are tokens of the step before that were not read."""
        device = self.kv.tensor.device
        batch = Batch.build(rows, self.kv.page_size, device, drawn)
        return batch, self._model.kernels.plan(batch.attention, device)

    def forward(self, batch: Batch, plan: Plan, on_layers: OnLayers | None = None) -> Tensor:
        """Logits float32 [R, vocab] of the batch's `logit_rows`.

        `on_layers(first, last, ready)` is called when the KV of layers [first, last) is complete and may be
        read by anyone; on a GPU, where it is only queued then, from the moment that `ready()` is true.
        """
        group = self._group(batch.attention.tokens) if on_layers is not None else 1
        on_layer = self._grouped(on_layers, group) if on_layers is not None else None
        return self._model.forward(
            batch.input_tokens(), batch.positions, self.kv.tensor, plan, on_layer, batch.logit_rows, group
        )

    def _group(self, tokens: int) -> int:
        layer_bytes = tokens * self.kv.layer_token_bytes
        return policy.layers_at_once(
            self.kv.tensor.shape[0], self._group_layers, layer_bytes, self._group_bytes
        )

    def _grouped(self, on_layers: OnLayers, group: int) -> Callable[[int], None]:
        return lambda layer: on_layers(layer // group * group, layer + 1, self._mark())

    def choose(self, sampler: Sampler, logits: Tensor, rows: Sequence[SamplingRow]) -> Choice:
        """The tokens of the rows that sample, by what `forward` gave. Without `ids` they must be read before
        the next step is launched."""
        if self.ahead and not sampler.asks_host(rows):
            return QueuedChoice(sampler, logits, rows)
        return LateChoice(sampler, logits, rows)

    def _mark(self) -> Ready | None:
        if not self.kv.tensor.is_cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event.query
