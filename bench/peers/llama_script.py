"""`llama_script.py FILE.gguf THREADS`: batches on llama.cpp, through llama-cpp-python's low-level interface.

Reads {"prompts": [[id...]...], "max_tokens": n} per line, writes {"first_s": [...], "gaps_s": [...]}: prompts
one after the other, then greedy steps of all of them, with flash attention.
"""

import json
import sys
import time
from typing import Any

import llama_cpp as llama
import numpy as np

PROMPT_BATCH = 2048
MICRO_BATCH = 512
_FLASH_ATTENTION = 1


class Model:
    def __init__(self, path: str, threads: int) -> None:
        llama.llama_backend_init()
        self._threads = threads
        self._model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._batch = llama.llama_batch_init(PROMPT_BATCH, 0, 1)

    def run(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        context = self._context(len(prompts), max(map(len, prompts)) + max_tokens)
        start = time.perf_counter()
        tokens, first_s = [], []
        for sequence, prompt in enumerate(prompts):
            for at in range(0, len(prompt), PROMPT_BATCH):
                part = prompt[at : at + PROMPT_BATCH]
                self._decode(
                    context, [(token, at + i, sequence) for i, token in enumerate(part)], last_only=True
                )
            tokens.append(self._greedy(context, -1))
            first_s.append(time.perf_counter() - start)
        gaps_s, last = [], time.perf_counter()
        for step in range(max_tokens - 1):
            rows = [(token, len(prompts[row]) + step, row) for row, token in enumerate(tokens)]
            self._decode(context, rows, last_only=False)
            tokens = [self._greedy(context, row) for row in range(len(prompts))]
            now = time.perf_counter()
            gaps_s.append(now - last)
            last = now
        llama.llama_free(context)
        return {"first_s": first_s, "gaps_s": gaps_s}

    def _context(self, sequences: int, tokens: int) -> Any:
        params = llama.llama_context_default_params()
        params.n_ctx = -(-tokens // 256) * 256 * sequences
        params.n_batch, params.n_ubatch, params.n_seq_max = PROMPT_BATCH, MICRO_BATCH, sequences
        params.n_threads = params.n_threads_batch = self._threads
        params.kv_unified = False
        params.flash_attn_type = _FLASH_ATTENTION
        return llama.llama_init_from_model(self._model, params)

    def _decode(self, context: Any, rows: list[tuple[int, int, int]], last_only: bool) -> None:
        """Compute (token, position, sequence) rows; logits of all, or of the last."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = not last_only or i == len(rows) - 1
        status = llama.llama_decode(context, batch)
        assert status == 0, f"llama_decode answers {status}"

    def _greedy(self, context: Any, row: int) -> int:
        logits = llama.llama_get_logits_ith(context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocabulary,)).argmax())


def main(path: str, threads: str) -> None:
    model = Model(path, int(threads))
    model.run([[1, 2, 3]], 2)
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(model.run(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
