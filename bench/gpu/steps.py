"""Steps of the engine over a model shaped like Llama 3 8B, against the limits measured before."""

import time
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.gpu import limits, shape
from bench.gpu.results import Results, arguments, limit
from kernels import load_kernels
from relay.sampling import SamplingParams
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.kv_pool import KVPool
from workers.engine.messages import Drop, Event, Prebuilt, Prefill, Prefilled, Reserve, Sampled, Work
from workers.engine.sampler import Sampler

PAGE_SIZE = 16
CHUNK_TOKENS = 4096
CONTEXT_TOKENS = 1024
ROWS = (1, 8, 64, 256)
PROMPTS_TOKENS = (512, 4096, 16384)
WARM_STEPS = 3
STEPS = 32
REPEATS = 3


class RandomModel:
    """What the engine asks of a model, with weights that mean nothing."""

    def __init__(self, size: shape.Shape, device: torch.device) -> None:
        self.kernels = load_kernels("auto", device.type)
        self._pass = self.kernels.compile(shape.decoder(size, device))

    @torch.inference_mode()
    def forward(self, *arguments: Any) -> Tensor:
        return self._pass(*arguments)


class Bench:
    def __init__(self, device: torch.device) -> None:
        small = device.type == "cpu"
        self.shape = shape.of(device)
        self.rows = (1, 2) if small else ROWS
        self.context_tokens = 64 if small else CONTEXT_TOKENS
        self.prompts_tokens = (64,) if small else PROMPTS_TOKENS
        tokens = max(self.rows[-1] * (self.context_tokens + PAGE_SIZE + STEPS), self.prompts_tokens[-1])
        pages = -(-tokens // PAGE_SIZE) + self.rows[-1]
        model = RandomModel(self.shape, device)
        kv = KVPool.allocate(self.shape.pool(pages, PAGE_SIZE), torch.bfloat16, device)
        self._events: list[Event] = []
        self._legs = 0
        self._engine = Engine(
            model,  # type: ignore[arg-type]
            kv,
            Sampler(self.shape.vocab, (), device, kernels=model.kernels),
            EngineConfig(self.shape.context_tokens, CHUNK_TOKENS, group_layers=8, reserve_tokens=0),
            eos_ids=(),
            salt=b"",
            on_event=self._events.append,
            on_produced=lambda _: None,
            on_computed=lambda _: None,
        )

    def decode_s(self, rows: int) -> float:
        """Of one step in a row of them, as they follow each other while nothing else happens."""
        legs = [self._work(self.context_tokens, WARM_STEPS + STEPS + 2) for _ in range(rows)]
        for leg in legs:
            self._engine.submit(Reserve(leg))
        self._engine.step()
        for leg in legs:
            self._engine.submit(Prebuilt(leg.key, Sampled(1)))
        for _ in range(WARM_STEPS):
            self._engine.step()
        start = time.perf_counter()
        for _ in range(STEPS):
            self._engine.step()
        elapsed_s = time.perf_counter() - start
        self._end(legs)
        return elapsed_s / STEPS

    def prefill_s(self, tokens: int) -> float:
        """From a prompt's admission to its first token: the median of a few after one that does not count."""
        return median([self._prefill_s(tokens) for _ in range(REPEATS + 1)][1:])

    def _prefill_s(self, tokens: int) -> float:
        leg = self._work(tokens, 1)
        self._events.clear()
        self._engine.submit(Prefill(leg, relay=True))
        start = time.perf_counter()
        while not any(isinstance(event, Prefilled) for event in self._events):
            self._engine.step()
        elapsed_s = time.perf_counter() - start
        self._end([leg])
        return elapsed_s

    def _work(self, tokens: int, max_tokens: int) -> Work:
        """Of a prompt that begins like no other, so that nothing of it is cached."""
        self._legs += 1
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return Work(f"leg{self._legs}", "", (self._legs, *[1] * (tokens - 1)), (), params)

    def _end(self, legs: list[Work]) -> None:
        for leg in legs:
            self._engine.submit(Drop(leg.key))
        while self._engine.step():
            pass
        self._engine.check()


def main() -> None:
    args = arguments(__doc__)
    results = Results(args.out, "steps")
    bench = Bench(torch.device(args.device))
    copy_gb_s, matrix_tflop_s = limit(args.out, limits.COPY), limit(args.out, limits.MATRIX)
    for rows in bench.rows:
        ms = bench.decode_s(rows) * 1e3
        read_gb = (2 * bench.shape.weights + rows * bench.context_tokens * bench.shape.kv_token_bytes) / 1e9
        goal = ">= 80% of copy" if rows == 64 else ""
        results.add(f"decode step, batch {rows}", ms, "ms", read_gb / ms * 1e3 / copy_gb_s, goal)
    for tokens in bench.prompts_tokens:
        ms = bench.prefill_s(tokens) * 1e3
        share = bench.shape.prefill_flop(tokens) / ms / 1e9 / matrix_tflop_s
        goal = ">= 60% of matrix" if tokens == 4096 else ""
        results.add(f"prefill, {tokens} tokens", ms, "ms", share, goal)


if __name__ == "__main__":
    main()
