"""A peer behind HTTP, driven by our client or by vLLM's own benchmark."""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from app.measure.closed_loop import Seen, closed_loop
from app.measure.completion import chunks, complete
from bench.client import random_prompt
from bench.peers.load import Load, SeenSteady, Steady
from bench.peers.peer import Peer
from bench.peers.vllm_bench import VllmBench

MODEL = "peer"  # the name under which each of them serves the model
_STEADY_PROMPT_TOKENS = 128
_STEADY_MAX_TOKENS = 7500
_BEGIN_S = 1.0  # of a steady stream, not counted
_MOST_LONG = 64  # long prompts at a time


class Served(Peer):
    url: str

    def __init__(self, name: str, vllm_bench: VllmBench | None) -> None:
        super().__init__(name)
        self._vllm_bench = vllm_bench

    def run(self, load: Load) -> Seen:
        if self._vllm_bench is not None:
            return self._vllm_bench.run(self.url, MODEL, load)
        return closed_loop(
            lambda prompt: complete(self.url, MODEL, prompt, load.output_tokens),
            load.prompts(),
            load.output_tokens,
            load.clients,
        )

    def run_steady(self, steady: Steady) -> SeenSteady:
        rng = random.Random(steady.seed)
        return SeenSteady(self._gaps(steady, rng, disturbed=False), self._gaps(steady, rng, disturbed=True))

    def _gaps(self, steady: Steady, rng: random.Random, disturbed: bool) -> list[float]:
        prompt = random_prompt(rng, _STEADY_PROMPT_TOKENS)
        gaps: list[float] = []
        stream = chunks(self.url, MODEL, prompt, _STEADY_MAX_TOKENS)
        with ThreadPoolExecutor(_MOST_LONG) as pool, closing(stream):
            last = next(stream)
            began = long_at = last + _BEGIN_S
            sent = []
            for now in stream:
                if now >= began:
                    gaps.append(now - last)
                if now >= began + steady.seconds:
                    break
                if disturbed and now >= long_at:
                    long_at += steady.every_s
                    sent.append(
                        pool.submit(complete, self.url, MODEL, random_prompt(rng, steady.long_tokens), 1)
                    )
                last = now
            for long in sent:
                long.result()
        return gaps
