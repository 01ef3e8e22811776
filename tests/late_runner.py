"""A device that computes by itself, played: what is launched is computed in order, once the test lets it or
somebody waits for it."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from kernels.base import Plan
from workers.engine.batch import Batch
from workers.engine.choice import Choice, LateChoice
from workers.engine.messages import Sampled
from workers.engine.runner import ModelRunner, OnLayers
from workers.engine.sampler import Sampler, SamplingRow, Unsampleable


class Queued:
    """A value on the device: None until it is computed. Who looks into it waits."""

    value: Any = None

    def __init__(self, runner: "LateRunner") -> None:
        self._runner = runner

    @property
    def there(self) -> bool:
        return self.value is not None

    def __getitem__(self, index: Any) -> Any:
        while not self.there:
            self._runner.compute(1)
        return self.value[index]


class LateRunner(ModelRunner):
    ahead = 1  # type: ignore[assignment]  # in place of the property

    def __init__(self, model: Any, kv: Any, group_layers: int) -> None:
        super().__init__(model, kv, group_layers)
        self._queue: deque[Callable[[], None]] = deque()
        self.most_launched = 0  # steps at a time
        self._launched = 0

    def compute(self, parts: int) -> None:
        """Let the device do the next `parts` things that it was asked for: a pass, or a choice of tokens."""
        for _ in range(min(parts, len(self._queue))):
            self._queue.popleft()()

    def forward(self, batch: Batch, plan: Plan, on_layers: OnLayers | None = None) -> Tensor:
        logits = Queued(self)
        run = super().forward
        self._launched += 1
        self.most_launched = max(self.most_launched, self._launched)

        def compute() -> None:
            drawn: Any = batch.drawn
            there = batch if drawn is None else batch._replace(drawn=drawn.value)
            logits.value = run(there, plan)

        self._queue.append(compute)
        if on_layers is not None:
            self._announce(on_layers, logits)
        return logits  # type: ignore[return-value]

    def _announce(self, on_layers: OnLayers, logits: Queued) -> None:
        layers = self.kv.tensor.shape[0]
        for first in range(0, layers, self._group_layers):
            on_layers(first, min(first + self._group_layers, layers), lambda: logits.there)

    def choose(self, sampler: Sampler, logits: Any, rows: Sequence[SamplingRow]) -> Choice:
        if isinstance(logits, Tensor):
            logits, there = Queued(self), logits
            logits.value = there
        return LateRead(self, sampler, logits, rows)

    def wait(self, queued: Queued) -> None:
        while not queued.there:
            self.compute(1)
        self._launched -= 1


class LateRead:
    def __init__(
        self, runner: LateRunner, sampler: Sampler, logits: Queued, rows: Sequence[SamplingRow]
    ) -> None:
        self.ids: Any = None
        self._runner = runner
        self._sampler = sampler
        self._logits = logits
        self._rows = rows
        if not sampler.asks_host(rows):
            self.ids, self._found = Queued(runner), Queued(runner)
            runner._queue.append(self._draw)

    def _draw(self) -> None:
        drawn = self._sampler.draw_together(self._logits.value, self._rows)
        self.ids.value, self._found.value = drawn

    def read(self) -> list[Sampled | Unsampleable]:
        if self.ids is None:
            self._runner.wait(self._logits)
            return LateChoice(self._sampler, self._logits.value, self._rows).read()
        self._runner.wait(self._found)
        return self._sampler.checked(self._found.value, self._rows)
