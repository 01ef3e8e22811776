"""An engine to drive step by step, over a model whose tokens depend on every byte of KV it should read."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from kernels.base import AttentionBatch
from kernels.decoder import ends_group
from relay.sampling import SamplingParams
from tests.late_runner import LateRunner
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.kv_pool import KVPool
from workers.engine.messages import (
    Admitted,
    Computed,
    Drop,
    Event,
    Prebuilt,
    Prefill,
    Prefilled,
    Produced,
    Reserve,
    Reserved,
    Work,
)
from workers.engine.sampler import Sampler
from workers.models import Model

LAYERS, PAGE_SIZE, VOCAB, EOS = 3, 4, 50, 0
_MODULUS = 999_983  # a float32 holds every remainder exactly


def _key(layer: int, position: int, token: int, before: int) -> int:
    return (before * 31 + token * 7919 + position * 104_729 + layer * 1_299_709 + 1) % _MODULUS


def _value(key: int) -> int:
    return (key * 17 + 5) % _MODULUS


def _next_token(keys: list[int], values: list[int]) -> int:
    return sum((i + 1) * key + (i + 7) * value for i, (key, value) in enumerate(zip(keys, values))) % VOCAB


def pool_rows(tokens: list[int]) -> list[tuple[list[int], list[int]]]:
    """Keys and values of each layer, by position, as HashingModel computes them."""
    rows = []
    for layer in range(LAYERS):
        keys: list[int] = []
        for position, token in enumerate(tokens):
            keys.append(_key(layer, position, token, keys[-1] if keys else 0))
        rows.append((keys, [_value(key) for key in keys]))
    return rows


def continuation(prompt: list[int], tokens: int) -> list[int]:
    """What HashingModel answers to a prompt, without pages."""
    known = list(prompt)
    for _ in range(tokens):
        rows = pool_rows(known)
        keys = [key for layer_keys, _ in rows for key in layer_keys]
        values = [value for _, layer_values in rows for value in layer_values]
        known.append(_next_token(keys, values))
    return known[len(prompt) :]


class HashingModel:
    """Has Model's `forward`. A key is a hash of its token and the key before it, read from the pool; the next
    token is a hash of all keys and values of the context, read from the pool."""

    class kernels:
        @staticmethod
        def plan(batch: AttentionBatch, device: torch.device) -> AttentionBatch:
            batch.check()
            return batch

    def __init__(self) -> None:
        self.batch_sizes: list[int] = []

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv: Tensor,
        plan: AttentionBatch,
        on_layer: Callable[[int], None] | None,
        logit_rows: Tensor,
        group_layers: int = 1,
    ) -> Tensor:
        pool = kv.numpy().reshape(kv.shape[:4])
        ids, at = tokens.tolist(), positions.tolist()
        assert len(ids) == len(at) == plan.tokens
        self.batch_sizes.append(len(plan.block_tables))
        for layer in range(LAYERS):
            row = 0
            for query, table in zip(plan.query_lens_tokens, plan.block_tables):
                for token, position in zip(ids[row : row + query], at[row : row + query]):
                    page, offset = divmod(position, PAGE_SIZE)
                    before = 0
                    if position:
                        before_page, before_offset = divmod(position - 1, PAGE_SIZE)
                        before = int(pool[layer, table[before_page], 0, before_offset])
                    key = _key(layer, position, token, before)
                    pool[layer, table[page], :, offset] = key, _value(key)
                row += query
            if on_layer is not None and ends_group(layer, group_layers, LAYERS):
                on_layer(layer)
        wanted, logits, row = logit_rows.tolist(), torch.zeros(len(logit_rows), VOCAB), 0
        for query, context, table in zip(plan.query_lens_tokens, plan.context_lens_tokens, plan.block_tables):
            row += query
            if row - 1 in wanted:
                keys, values = (
                    pool[:, table, half].reshape(LAYERS, -1)[:, :context].astype(int).flatten().tolist()
                    for half in (0, 1)
                )
                logits[wanted.index(row - 1), _next_token(keys, values)] = 1.0
        return logits


class Rig:
    """`step` and `run` check the page accounts after each step."""

    late = False  # whether on a device that computes by itself

    def __init__(self, pages: int = 64, model: Any = None, kv: KVPool | None = None, **config: int) -> None:
        self.model = model or HashingModel()
        shape = (LAYERS, pages, 2, PAGE_SIZE, 1, 1)
        self.kv = kv or KVPool.allocate(shape, torch.float32, torch.device("cpu"))
        self.events: list[Event] = []
        self.produced: list[Produced] = []
        self.computed: list[Computed] = []
        self.on_computed: Callable[[Computed], None] = self.computed.append
        self.told_at_step: list[int] = []  # forward passes before each call of on_produced
        settings = {
            "context_tokens": 1000,
            "chunk_tokens": 16,
            "group_layers": 2,
            "reserve_tokens": 4,
        } | config
        vocab = VOCAB if model is None else model.config.vocab_size
        sampling_kernels = None if model is None else model.kernels
        self.engine = Engine(
            cast(Model, self.model),
            self.kv,
            Sampler(vocab, {EOS}, self.kv.tensor.device, kernels=sampling_kernels),
            EngineConfig(**settings),
            eos_ids={EOS},
            salt=b"rig",
            on_event=lambda event: self.events.append(event),
            on_produced=self._tell,
            on_computed=lambda part: self.on_computed(part),
        )
        if self.late:
            self.engine._runner = LateRunner(self.model, self.kv, settings["group_layers"])

    @property
    def device(self) -> LateRunner:
        runner = self.engine._runner
        assert isinstance(runner, LateRunner)
        return runner

    def _tell(self, produced: list[Produced]) -> None:
        self.told_at_step.append(self.engine.heartbeat.step)
        self.produced += produced

    def submit(self, *commands: Any) -> None:
        for command in commands:
            self.engine.submit(command)

    def step(self) -> bool:
        worked = self.engine.step()
        self.engine.check()
        return worked

    def run(self, steps: int = 500) -> None:
        """Until nothing can run before another command."""
        for _ in range(steps):
            if not self.step():
                return
        raise AssertionError(f"still running after {steps} steps")

    def text(self, key: str) -> list[int]:
        """The output tokens of a leg, whose positions are checked to be without gaps."""
        mine = [produced for produced in self.produced if produced.key == key]
        assert [p.position for p in mine] == list(range(mine[0].position, mine[0].position + len(mine)))
        return [p.sampled.token_id for p in mine]

    def the(self, kind: type[Event], key: str) -> Any:
        """The one event of this kind for a leg."""
        found: list[Any] = [event for event in self.events if isinstance(event, kind)]
        found = [event for event in found if event.key == key]
        assert len(found) == 1, f"{len(found)} {kind.__name__} for {key}: {self.events}"
        return found[0]

    def admitted(self, key: str) -> Admitted:
        return cast(Admitted, self.the(Admitted, key))


def work(key: str, prompt: list[int], tokens: int = 8, emitted: tuple[int, ...] = (), **more: Any) -> Work:
    """Greedy and without EOS unless `params` says otherwise."""
    params = more.pop("params", None) or SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return Work(key, f"request-{key}", tuple(prompt), emitted, params, **more)


def unified(key: str, prompt: list[int], tokens: int = 8, **more: Any) -> Prefill:
    return Prefill(work(key, prompt, tokens, **more), relay=False)


def relayed(key: str, prompt: list[int], tokens: int = 8, **more: Any) -> Prefill:
    return Prefill(work(key, prompt, tokens, **more), relay=True)


class Relay:
    """A prefill engine and a decode engine; pages are copied when they are announced, from a late device at
    the end."""

    def __init__(self, prefill: Rig, decode: Rig) -> None:
        self.prefill, self.decode = prefill, decode
        prefill.on_computed = self.announced
        self.waiting: list[Computed] = []

    def reserve(self, leg: Prefill) -> None:
        self.decode.submit(Reserve(leg.work))
        self.decode.step()

    def announced(self, part: Computed) -> None:
        if part.ready is None:
            self.copy(part)
        else:
            self.waiting.append(part)

    def copy(self, part: Computed) -> None:
        assert part.ready is None or part.ready()
        source = self.prefill.admitted(part.key).pages
        reserved = self.decode.the(Reserved, part.key)
        first, target = reserved.first_page, reserved.pages
        assert len(source) == first + len(target)
        for page in range(max(first, part.first_page), part.last_page):
            layers = slice(part.first_layer, part.last_layer)
            self.decode.kv.tensor[layers, target[page - first]] = self.prefill.kv.tensor[layers, source[page]]

    def finish(self, leg: Prefill) -> None:
        """KV-ready: the cached prefix travels, the decode leg joins, the prefill leg ends."""
        admitted: Admitted = self.prefill.admitted(leg.work.key)
        layers = self.prefill.kv.tensor.shape[0]
        self.copy(Computed(leg.work.key, 0, layers, 0, admitted.cached_tokens // self.prefill.kv.page_size))
        first = self.prefill.the(Prefilled, leg.work.key).first
        for part in self.waiting:
            if part.key == leg.work.key:
                self.copy(part)
        self.prefill.submit(Drop(leg.work.key))
        self.decode.submit(Prebuilt(leg.work.key, first))
