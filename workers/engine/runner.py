"""Runs the model over a batch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.base import Plan
from workers.engine.batch import Batch, Row
from workers.engine.kv_pool import KVPool
from workers.engine.messages import Ready
from workers.models.model import Model

OnLayers = Callable[[int, int, Ready | None], None]


class ModelRunner:
    """A model and the KV pool that it reads and writes."""

    def __init__(self, model: Model, kv: KVPool, group_layers: int) -> None:
        self.kv = kv
        self._model = model
        self._group_layers = group_layers

    def prepare(self, rows: Sequence[Row]) -> tuple[Batch, Plan]:
        """What `forward` needs for these rows."""
        device = self.kv.tensor.device
        batch = Batch.build(rows, self.kv.page_size, device)
        return batch, self._model.kernels.plan(batch.attention, device)

    def forward(self, batch: Batch, plan: Plan, on_layers: OnLayers | None = None) -> Tensor:
        """Logits float32 [R, vocab] of the batch's `logit_rows`.

        `on_layers(first, last, ready)` is called when the KV of layers [first, last) is complete and may be
        read by anyone; on a GPU, where it is only queued then, from the moment that `ready()` is true.
        """
        on_layer = self._grouped(on_layers) if on_layers is not None else None
        return self._model.forward(
            batch.tokens, batch.positions, self.kv.tensor, plan, on_layer, batch.logit_rows
        )

    def _grouped(self, on_layers: OnLayers) -> Callable[[int], None]:
        layers, group = self.kv.tensor.shape[0], self._group_layers

        def on_layer(layer: int) -> None:
            last = layer + 1
            if last % group and last != layers:
                return
            on_layers(layer // group * group, last, self._mark())

        return on_layer

    def wait(self) -> None:
        """Until a GPU has computed all that was queued: from then on pages may be freed and sent."""
        if self.kv.tensor.is_cuda:
            torch.cuda.current_stream().synchronize()

    def _mark(self) -> Ready | None:
        if not self.kv.tensor.is_cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event.query
