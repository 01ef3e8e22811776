"""What the engine adds to a decode step outside the model's forward pass, in one process."""

import torch

from app.measure.table import show
from bench import machine
from kernels import load_kernels
from relay.grammar import Grammars, regex_grammar
from relay.sampling import SamplingParams
from relay.settings import Settings
from relay.tokenizer import Tokenizer
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.kv_pool import KVPool
from workers.engine.messages import Prefill, Work
from workers.engine.sampler import Sampler
from workers.models import load_model

BATCH = 8
CONTEXT_TOKENS = 256
STEPS = 60


def run() -> None:
    settings = Settings.from_env()
    torch.set_num_threads(1)
    model = load_model(settings.model_path, settings.dtype, "cpu", load_kernels("auto"))
    tokenizer = Tokenizer.load(settings.model_path)
    eos_ids, grammars = tokenizer.eos_ids, Grammars(tokenizer, model.config.vocab_size)
    rows = []
    for name, params in {
        "greedy": SamplingParams(max_tokens=STEPS + 20, temperature=0.0, ignore_eos=True),
        "temperature 0.8, top-p 0.95": SamplingParams(
            max_tokens=STEPS + 20, temperature=0.8, top_p=0.95, ignore_eos=True
        ),
        "greedy, under a grammar": SamplingParams(
            max_tokens=STEPS + 20, temperature=0.0, ignore_eos=True, grammar=regex_grammar("[a-zA-Z ,.]*")
        ),
    }.items():
        shape = model.config.kv_shape(BATCH * (CONTEXT_TOKENS + 2 * STEPS) // 16, 16)
        kv = KVPool.allocate(shape, model.dtype, torch.device("cpu"))
        engine = Engine(
            model,
            kv,
            Sampler(model.config.vocab_size, eos_ids, grammars=grammars),
            EngineConfig(context_tokens=2048),
            eos_ids=eos_ids,
            salt=b"",
            on_event=_ignore,
            on_produced=_ignore,
            on_computed=_ignore,
        )
        for i in range(BATCH):
            prompt = tuple(1000 + (7 * i + j) % 5000 for j in range(CONTEXT_TOKENS))
            engine.submit(
                Prefill(Work(f"leg{i}", f"req{i}", prompt, (), params, arrival_ms=float(i)), relay=False)
            )
        while engine.stats.prefill_tokens < BATCH * CONTEXT_TOKENS:  # until all of them decode
            engine.step()
        before = engine.stats
        for _ in range(STEPS):
            engine.step()
        after = engine.stats
        assert after.decode_tokens - before.decode_tokens == BATCH * STEPS
        per_step = [1e3 * (b - a) / STEPS for a, b in zip(before[1:5], after[1:5])]
        step_ms, plan_ms, forward_ms, sample_ms = per_step
        rows.append((name, step_ms, forward_ms, step_ms - forward_ms, plan_ms, sample_ms))
    show(
        f"Engine per decode step, batch {BATCH}, context {CONTEXT_TOKENS}, 1 thread "
        "(goal: outside forward <= 1 ms greedy)",
        ("sampling", "step ms", "forward ms", "outside ms", "of it plan ms", "of it sample ms"),
        rows,
    )


def _ignore(_: object) -> None:
    """This benchmark has no other threads."""


if __name__ == "__main__":
    print(machine.name())
    run()
