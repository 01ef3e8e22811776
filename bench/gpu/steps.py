"""Decode steps and prefills of a model shaped like Llama 3 8B, against the limits measured before."""

import torch
from torch import Tensor

from bench.gpu import limits, shape
from bench.gpu.results import Results, arguments, limit
from kernels import AttentionBatch, load_kernels

PAGE_SIZE = 16
CHUNK_TOKENS = 4096
CONTEXT_TOKENS = 1024
ROWS = (1, 8, 64, 256)
PROMPTS_TOKENS = (512, 4096, 16384)


class Bench:
    def __init__(self, device: torch.device) -> None:
        small = device.type == "cpu"
        self.device = device
        self.shape = shape.of(device)
        self.rows = (1, 2) if small else ROWS
        self.context_tokens = 64 if small else CONTEXT_TOKENS
        self.prompts_tokens = (64,) if small else PROMPTS_TOKENS
        self._kernels = load_kernels("auto", device.type)
        self._pass = self._kernels.compile(shape.decoder(self.shape, device))
        tokens = max(self.rows[-1] * self.context_tokens, self.prompts_tokens[-1])
        self._kv = torch.zeros(
            self.shape.pool(-(-tokens // PAGE_SIZE), PAGE_SIZE), dtype=torch.bfloat16, device=device
        )

    @torch.inference_mode()
    def step(self, queries: list[int], contexts: list[int]) -> Tensor:
        """As the engine runs it: the plan, the pass, and the highest logit of each row read back."""
        tables, page = [], 0
        for context in contexts:
            count = -(-context // PAGE_SIZE)
            tables.append(range(page, page + count))
            page += count
        batch = AttentionBatch(queries, contexts, tables, PAGE_SIZE)
        ids = torch.ones(batch.tokens, dtype=torch.int64, device=self.device)
        positions = torch.cat([torch.arange(c - q, c) for q, c in zip(queries, contexts)]).to(self.device)
        last = (torch.tensor(queries).cumsum(0) - 1).to(self.device)
        plan = self._kernels.plan(batch, self.device)
        return self._pass(ids, positions, self._kv, plan, None, last).argmax(-1).cpu()

    def decode_s(self, rows: int) -> float:
        return limits.seconds(lambda: self.step([1] * rows, [self.context_tokens] * rows), self.device, 15)

    def prefill_s(self, tokens: int) -> float:
        def run() -> None:
            for start in range(0, tokens, CHUNK_TOKENS):
                stop = min(start + CHUNK_TOKENS, tokens)
                self.step([stop - start], [stop])

        return limits.seconds(run, self.device, 3)


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
