"""A real model in the engine says what transformers says, whatever pages, chunks, batches and workers."""

import random

import pytest
import torch

from tests.engine_rig import Relay, Rig, relayed, unified
from tests.kernel_sets import FASTEST, kernels_called
from tests.models import VOCAB_SIZE, random_model, save_directory
from workers.engine.kv_pool import KVPool
from workers.engine.messages import Retracted
from workers.models import Model, load_model

TOKENS = 6


@pytest.fixture(scope="module", params=FASTEST)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = save_directory(random_model("llama"), tmp_path_factory.mktemp("llama"))
    return load_model(path, "float32", "cpu", kernels_called(request.param))


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, ...], list[int]]:
    """Prompts, the last two with the start of the first, and how transformers continues them."""
    draw = random.Random(3)
    prompts = [tuple(draw.randrange(3, VOCAB_SIZE) for _ in range(length)) for length in (21, 4, 1)]
    prompts += [prompts[0][:12], (*prompts[0][:17], 5, 6)]
    model = random_model("llama")
    answers = {}
    for prompt in prompts:
        known = list(prompt)
        for _ in range(TOKENS):
            with torch.no_grad():
                known.append(int(model(torch.tensor([known])).logits[0, -1].argmax()))
        answers[prompt] = known[len(prompt) :]
    return answers


def rig(model: Model, pages: int = 40, **config: int) -> Rig:
    kv = KVPool.allocate(model.config.kv_shape(pages, page_size=4), model.dtype, model.device)
    return Rig(model=model, kv=kv, context_tokens=200, **config)


@pytest.mark.parametrize("chunk_tokens", [4, 9, 200])
def test_alone_and_from_the_cache(
    model: Model, expected: dict[tuple[int, ...], list[int]], chunk_tokens: int
) -> None:
    one = rig(model, chunk_tokens=chunk_tokens)
    for turn in range(2):
        for i, (prompt, answer) in enumerate(expected.items()):
            key = f"{turn}-{i}"
            one.submit(unified(key, list(prompt), TOKENS))
            one.run()
            assert one.text(key) == answer
    assert one.engine.stats.cached_tokens > 0


def test_in_one_batch(model: Model, expected: dict[tuple[int, ...], list[int]]) -> None:
    one = rig(model, chunk_tokens=12)
    one.submit(*(unified(str(i), list(prompt), TOKENS) for i, prompt in enumerate(expected)))
    one.run()
    assert [one.text(str(i)) for i in range(len(expected))] == list(expected.values())


@pytest.mark.parametrize("group_layers", [1, 2, 99])
def test_over_two_workers(
    model: Model, expected: dict[tuple[int, ...], list[int]], group_layers: int
) -> None:
    relay = Relay(rig(model, chunk_tokens=8, group_layers=group_layers), rig(model))
    legs = [relayed(str(i), list(prompt), TOKENS) for i, prompt in enumerate(expected)]
    for leg in legs:
        relay.reserve(leg)
        relay.prefill.submit(leg)
    relay.prefill.run()
    for leg in legs:
        relay.finish(leg)
    relay.decode.run()
    assert [relay.decode.text(leg.work.key) for leg in legs] == list(expected.values())


def test_after_a_retraction(model: Model, expected: dict[tuple[int, ...], list[int]]) -> None:
    """Two legs of 21 tokens in twelve pages: the younger loses its own and resumes with what it has."""
    (prompt, answer), *_ = expected.items()
    other = tuple(reversed(prompt))
    alone = rig(model)
    alone.submit(unified("other", list(other), 12))
    alone.run()
    tight = rig(model, pages=12, reserve_tokens=1, chunk_tokens=50)
    tight.submit(unified("old", list(prompt), 12, arrival_ms=1.0))
    tight.submit(unified("young", list(other), 12, arrival_ms=2.0))
    tight.run()
    assert Retracted("young") in tight.events
    emitted = tight.text("young")
    tight.submit(unified("again", list(other), 12, emitted=tuple(emitted), arrival_ms=2.0))
    tight.run()
    assert tight.text("old")[:TOKENS] == answer
    assert emitted + tight.text("again") == alone.text("other")
