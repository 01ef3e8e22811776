"""The first steps of a process fit into its model and its pool."""

from pathlib import Path

import pytest
import torch

from kernels import AttentionBatch, load_kernels
from kernels.reference import Plan, ReferenceKernels
from tests.models import random_model, save_directory
from workers.engine.kv_pool import KVPool
from workers.models import Model, load_model
from workers.warm_up import warm_up

PAGE_SIZE = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path: Path = save_directory(random_model("llama"), tmp_path_factory.mktemp("llama"))
    return load_model(path, "float32", "cpu", load_kernels("reference"))


@pytest.mark.parametrize(("tokens", "pages", "context"), [(64, 40, 64), (512, 40, 256), (512, 3, 48)])
def test_a_chunk_may_be_longer_than_context_and_pool(
    model: Model, tokens: int, pages: int, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[AttentionBatch] = []
    plan = ReferenceKernels.plan

    def note(kernels: ReferenceKernels, batch: AttentionBatch, device: torch.device) -> Plan:
        planned.append(batch)
        return plan(kernels, batch, device)

    monkeypatch.setattr(ReferenceKernels, "plan", note)
    kv = KVPool.allocate(model.config.kv_shape(pages, PAGE_SIZE), model.dtype, model.device)
    warm_up(model, kv, tokens, max_rows=4)
    assert [batch.context_lens_tokens for batch in planned] == [[context], [context]]
