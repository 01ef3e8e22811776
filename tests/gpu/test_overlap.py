"""Steps that overlap on the device against the same steps one by one, and that a launch waits for nothing."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kernels import load_kernels
from relay.sampling import SamplingParams
from tests.engine_rig import PAGE_SIZE, Rig, unified
from tests.models import VOCAB_SIZE, random_model, save_directory
from workers.engine.batch import Row
from workers.engine.engine import Engine
from workers.engine.kv_pool import KVPool
from workers.engine.runner import ModelRunner
from workers.models import Model, load_model

DEVICE = "cuda"
GIVEN = (
    {"temperature": 0.0},
    {"seed": 1},
    {"seed": 2, "temperature": 0.7, "top_k": 9},
    {"seed": 3, "top_p": 0.8},
    {"seed": 4, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
)


@pytest.fixture(scope="module", params=[("float32", "reference"), ("bfloat16", "auto")], ids=lambda p: p[0])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    dtype, kernels = request.param
    path: Path = save_directory(random_model("llama", head_dim=64), tmp_path_factory.mktemp("llama"))
    return load_model(path, dtype, DEVICE, load_kernels(kernels, DEVICE))


def texts(model: Model) -> list[list[int]]:
    kv = KVPool.allocate(model.config.kv_shape(200, PAGE_SIZE), model.dtype, model.device)
    rig = Rig(model=model, kv=kv, chunk_tokens=12)
    for i, given in enumerate(GIVEN):
        prompt = [(7 * i + j) % (VOCAB_SIZE - 3) + 3 for j in range(5 + 6 * i)]
        params = SamplingParams(max_tokens=24, ignore_eos=True, **given)  # type: ignore[arg-type]
        rig.submit(unified(f"leg{i}", prompt, params=params))
    rig.run()
    return [rig.text(f"leg{i}") for i in range(len(GIVEN))]


def test_overlapped_steps_give_the_tokens_of_steps_one_by_one(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlapped = texts(model)
    assert texts(model) == overlapped, "the same seeds, the same tokens"
    monkeypatch.setattr(ModelRunner, "ahead", 0)
    assert texts(model) == overlapped


def test_a_launch_waits_for_nothing(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    if model.dtype is torch.float32:
        pytest.skip("plain torch plans with copies that wait")
    texts(model)  # what is captured or compiled at first may wait
    launch = Engine._launch

    def watched(engine: Engine, rows: Sequence[Row]) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            launch(engine, rows)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Engine, "_launch", watched)
    texts(model)
