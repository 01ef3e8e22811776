"""`transformers_script.py FOLDER THREADS`: batches on Hugging Face transformers, bfloat16, greedy.

Reads {"prompts": [[id...]...], "max_tokens": n} per line, writes {"first_s": [...], "gaps_s": [...]}.
"""

import itertools
import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class Model:
    def __init__(self, folder: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """All prompts at once: they have the same length."""
        start = time.perf_counter()
        ids, cache, at = torch.tensor(prompts), None, []
        for _ in range(max_tokens):
            out = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids, cache = out.logits[:, -1].argmax(dim=-1, keepdim=True), out.past_key_values
            at.append(time.perf_counter())
        return {
            "first_s": [at[0] - start] * len(prompts),
            "gaps_s": [after - before for before, after in itertools.pairwise(at)],
        }


def main(folder: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    model = Model(folder)
    model.run([[1, 2, 3]], 2)
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(model.run(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
