"""The log probabilities of prompts: those of transformers, whatever chunks, batches, caches and workers."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from relay.prompt_logprobs import PromptLogprobs
from relay.sampling import SamplingParams
from tests.engine_rig import Relay, Rig, relayed, unified
from tests.kernel_sets import FASTEST, kernels_called
from tests.models import VOCAB_SIZE, random_model, save_directory
from workers.engine.kv_pool import KVPool
from workers.engine.messages import Prefilled
from workers.engine.policy import scored_pending
from workers.engine.scoring import score
from workers.models import Model, load_model

TOP = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path: Path = save_directory(random_model("llama"), tmp_path_factory.mktemp("llama"))
    return load_model(path, "float32", "cpu", kernels_called(FASTEST[0]))


def prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(length)]


def rig(model: Model, **config: int) -> Rig:
    kv = KVPool.allocate(model.config.kv_shape(60, page_size=4), model.dtype, model.device)
    return Rig(model=model, kv=kv, context_tokens=200, **config)


def scored(max_tokens: int = 2, wanted: int = TOP) -> SamplingParams:
    return SamplingParams(max_tokens, temperature=0.0, ignore_eos=True, prompt_logprobs=wanted)


def check(found: PromptLogprobs | None, ids: list[int]) -> None:
    """Against transformers."""
    assert found is not None
    with torch.no_grad():
        wanted = random_model("llama")(torch.tensor([ids])).logits[0, :-1].log_softmax(dim=-1).numpy()
    rows = np.arange(len(ids) - 1)
    own = wanted[rows, ids[1:]]
    assert found.ids[:, 0].tolist() == ids[1:]
    np.testing.assert_allclose(found.logprobs[:, 0], own, atol=1e-4)
    assert found.ranks.tolist() == (1 + (wanted > own[:, None]).sum(axis=1)).tolist()
    best = np.argsort(-wanted, axis=1)[:, :TOP]
    assert found.ids[:, 1:].tolist() == best.tolist()
    np.testing.assert_allclose(found.logprobs[:, 1:], np.take_along_axis(wanted, best, 1), atol=1e-4)


@pytest.mark.parametrize("scored_tokens", [4, 10, 100])
def test_chunks_and_neighbours_change_nothing(model: Model, scored_tokens: int) -> None:
    one = rig(model, scored_tokens=scored_tokens, chunk_tokens=24)
    prompts = {
        key: prompt(seed, length) for seed, (key, length) in enumerate({"a": 30, "b": 9, "c": 17}.items())
    }
    one.submit(*(unified(key, ids, params=scored()) for key, ids in prompts.items()))
    one.submit(unified("plain", prompt(9, 40), 5))
    one.run()
    for key, ids in prompts.items():
        (first, *others) = [produced for produced in one.produced if produced.key == key]
        assert first.prompted is not None
        check(first.prompted.scores, ids)
        assert [produced.prompted for produced in others] == [None] * len(others)
    assert len(one.text("plain")) == 5


def test_cached_pages_are_computed_again(model: Model) -> None:
    ids = prompt(1, 21)
    one = rig(model)
    one.submit(unified("a", ids, 2))
    one.run()
    one.submit(unified("b", ids, params=scored()))
    one.run()
    assert one.admitted("b").cached_tokens == 0
    (first, *_) = [produced for produced in one.produced if produced.key == "b"]
    assert first.prompted is not None
    check(first.prompted.scores, ids)
    assert one.text("a") == one.text("b")


def test_a_prefill_worker_tells_them_and_a_later_attempt_does_not(model: Model) -> None:
    ids = prompt(2, 13)
    relay = Relay(rig(model), rig(model))
    leg = relayed("a", ids, params=scored())
    relay.reserve(leg)
    relay.prefill.submit(leg)
    relay.prefill.run()
    check(relay.prefill.the(Prefilled, "a").scores, ids)
    relay.prefill.submit(relayed("b", ids, emitted=(5,), params=scored()))
    relay.prefill.on_computed = lambda part: None
    relay.prefill.run()
    assert relay.prefill.the(Prefilled, "b").scores is None
    assert relay.prefill.admitted("b").cached_tokens == 12


def test_a_prompt_of_one_token_has_none(model: Model) -> None:
    one = rig(model)
    one.submit(unified("a", [5], params=scored()))
    one.run()
    assert one.produced[0].prompted is not None
    assert one.produced[0].prompted.scores is None


def test_a_step_holds_the_logits_of_one_scored_prompt() -> None:
    assert scored_pending([50, 30, 40, 7], [False, True, True, False], 16) == [50, 16, 0, 7]
    assert scored_pending([3], [True], 16) == [3]
    assert scored_pending([], [], 16) == []


def test_packed_and_unpacked() -> None:
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    for wanted in (0, 5):
        found = score(logits, list(range(20)), wanted)
        again = PromptLogprobs.unpack(found.pack())
        for left, right in zip(found, again, strict=True):
            assert left.shape == right.shape
            np.testing.assert_array_equal(left, right)
    assert score(logits, [0] * 20, 99).ids.shape == (20, 51)
    assert PromptLogprobs.unpack(PromptLogprobs.empty().pack()).pairs() == []
