"""The models against transformers on the same weights."""

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import AttentionBatch, Kernels
from relay.model_file import default_model_path
from relay.tokenizer import Tokenizer
from tests.kernel_sets import ALL, FASTEST, kernels_called
from tests.model_session import LENGTH, PAGE_SIZE, Session, chunked, random_tokens
from tests.models import (
    VOCAB_SIZE,
    default_model_in_transformers,
    random_model,
    save_directory,
    save_gguf,
)
from workers.models import ModelConfig, load_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 32}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama without grouping": ("llama", {"num_key_value_heads": 4}),
    "llama with one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama explicit head_dim": ("llama", {"head_dim": 24}),
    "llama linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}},
    ),
    "llama llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama yarn rope": ("llama", {"rope_parameters": YARN}),
    "llama yarn attention factor": (
        "llama",
        {"rope_parameters": YARN | {"attention_factor": 0.7, "beta_fast": 8.0, "beta_slow": 2.0}},
    ),
    "llama yarn mscale": ("llama", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral window": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 window from layer 1": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen2 window switched off": ("qwen2", {"use_sliding_window": False, "sliding_window": 9}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3 tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}

# All but what GGUF has no keys for: yarn's other factors, and windows on some layers only.
GGUF_CASES = [case for case in CASES if not re.search("factor|mscale|qwen2 window|qwen2 yarn", case)]

# What llama.cpp's converter writes for a scaling that is no tensor.
GGUF_SCALING: dict[str, dict[str, float | str]] = {
    "llama linear rope": {"rope.scaling.type": "linear", "rope.scaling.factor": 3.0},
    "llama yarn rope": {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 8.0,
        "rope.scaling.original_context_length": 32.0,
    },
}


@pytest.fixture(params=FASTEST)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_called(request.param)


@torch.inference_mode()
def in_transformers(model: Any, tokens: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits.float()


@pytest.mark.parametrize("case", CASES)
def test_family_equals_transformers(kernels: Kernels, case: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    theirs = random_model(family, **overrides)
    ours = load_model(save_directory(theirs, tmp_path), "float32", "cpu", kernels)
    tokens = random_tokens()
    expected = in_transformers(theirs, tokens)
    got = chunked(ours, tokens, [13, 6, 17])
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("case", GGUF_CASES)
def test_gguf_equals_transformers(kernels: Kernels, case: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    theirs = random_model(family, **overrides)
    file = save_gguf(theirs, tmp_path / "model.gguf", GGUF_SCALING.get(case))
    tokens = random_tokens()
    got = chunked(load_model(file, "float32", "cpu", kernels), tokens, [LENGTH])
    torch.testing.assert_close(got, in_transformers(theirs, tokens), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    "case", ["llama llama3 rope", "llama yarn rope", "qwen2 window from layer 1", "qwen3"]
)
def test_config_of_older_files(case: str, tmp_path: Path) -> None:
    """Rotation in `rope_theta` and `rope_scaling`, windows without `layer_types`, no `head_dim`."""
    family, overrides = CASES[case]
    directory = save_directory(random_model(family, **overrides), tmp_path)
    expected = ModelConfig.load(directory)
    config = json.loads((directory / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    config.pop("layer_types", None)
    if expected.head_dim == expected.hidden_size // expected.heads:
        config.pop("head_dim", None)
    (directory / "config.json").write_text(json.dumps(config))
    assert ModelConfig.load(directory) == expected


def test_sharded_directory(kernels: Kernels, tmp_path: Path) -> None:
    theirs = random_model("llama")
    directory = save_directory(theirs, tmp_path, max_shard_size="60KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    tokens = random_tokens(20)
    got = chunked(load_model(directory, "float32", "cpu", kernels), tokens, [20])
    torch.testing.assert_close(got, in_transformers(theirs, tokens), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kernels", ALL, indirect=True)
def test_requests_of_one_step_do_not_disturb_each_other(kernels: Kernels, tmp_path: Path) -> None:
    theirs = random_model("qwen3", head_dim=32)
    model = load_model(save_directory(theirs, tmp_path), "float32", "cpu", kernels)
    texts = [random_tokens(30, seed) for seed in range(4)]
    session = Session(model, requests=4)
    session.step([(0, texts[0][:9]), (1, texts[1][:29])])
    # A decode, a prefill with a prefix and two whole prompts in one step, in no particular order.
    mixed = session.step([(3, texts[3]), (1, texts[1][29:]), (0, texts[0][9:]), (2, texts[2][:1])])
    for request, got in zip((3, 1, 0, 2), mixed, strict=True):
        upto = session.done_tokens[request]
        expected = in_transformers(theirs, texts[request][:upto])[-len(got) :]
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)


def test_each_layer_is_reported_once_with_its_kv_written(kernels: Kernels, tmp_path: Path) -> None:
    model = load_model(save_directory(random_model("llama"), tmp_path), "float32", "cpu", kernels)
    tokens = random_tokens(10)
    plan = kernels.plan(AttentionBatch([10], [10], [[2, 0, 1]], PAGE_SIZE), model.device)
    kv = torch.full(model.config.kv_shape(3, PAGE_SIZE), float("nan"))
    written_layers = []

    def on_layer(layer: int) -> None:
        per_layer = [not kv[i, 2].isnan().any() for i in range(model.config.layers)]
        written_layers.append((layer, per_layer.count(True)))

    logits = model.forward(
        torch.tensor(tokens), torch.arange(10), kv, plan, on_layer, torch.tensor([], dtype=torch.int64)
    )
    assert written_layers == [(0, 1), (1, 2), (2, 3)]
    assert logits.shape == (0, VOCAB_SIZE)
    written_layers.clear()
    kv.fill_(float("nan"))
    model.forward(
        torch.tensor(tokens), torch.arange(10), kv, plan, on_layer, torch.tensor([], dtype=torch.int64), 2
    )
    assert written_layers == [(1, 2), (2, 3)]


@pytest.mark.parametrize("kernels", ALL, indirect=True)
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.15), ("float16", 0.02)])
def test_half_precision_stays_close(kernels: Kernels, dtype: str, tolerance: float, tmp_path: Path) -> None:
    theirs = random_model("llama", tie_word_embeddings=True)
    tokens = random_tokens()
    expected = in_transformers(theirs, tokens)
    got = chunked(load_model(save_directory(theirs, tmp_path), dtype, "cpu", kernels), tokens, [20])
    assert got.dtype == torch.float32
    assert (got - expected).std() < tolerance * expected.std()


@pytest.mark.parametrize("wrong", ["token", "position", "page", "row"])
def test_what_is_not_there_is_refused(wrong: str, tmp_path: Path) -> None:
    """In C++ a wrong index would read anything."""
    model = load_model(
        save_directory(random_model("llama"), tmp_path), "float32", "cpu", kernels_called(FASTEST[1])
    )
    at = dict.fromkeys(("token", "position", "page", "row"), 0) | {wrong: 10_000}
    kv = torch.zeros(model.config.kv_shape(2, PAGE_SIZE))
    plan = model.kernels.plan(AttentionBatch([1], [1], [[at["page"]]], PAGE_SIZE), model.device)
    token, position, row = (torch.tensor([at[name]]) for name in ("token", "position", "row"))
    with pytest.raises(ValueError, match="10000"):
        model.forward(token, position, kv, plan, None, row)


@pytest.fixture(scope="module")
def chat_tokens() -> list[int]:
    tokenizer = Tokenizer.load(default_model_path())
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    return tokenizer.encode(prompt, add_special_tokens=False)


def test_default_model_equals_transformers(kernels: Kernels, chat_tokens: list[int]) -> None:
    theirs = default_model_in_transformers()
    model = load_model(default_model_path(), "float32", "cpu", kernels)
    session = Session(model, length=len(chat_tokens) + 16, page_size=16)
    (logits,) = session.step([(0, chat_tokens)])
    torch.testing.assert_close(logits, in_transformers(theirs, chat_tokens), atol=2e-3, rtol=1e-3)
    greedy = [int(logits[-1].argmax())]
    while len(greedy) < 9:
        ((last,),) = session.step([(0, greedy[-1:])])
        greedy.append(int(last.argmax()))
    inputs = torch.tensor([chat_tokens])
    expected = theirs.generate(inputs, max_new_tokens=9, do_sample=False)[0, len(chat_tokens) :].tolist()
    assert greedy[: len(expected)] == expected
    assert "Paris" in Tokenizer.load(default_model_path()).decode(greedy)


def test_default_model_in_bfloat16_is_as_close_as_transformers(
    kernels: Kernels, chat_tokens: list[int]
) -> None:
    expected = in_transformers(default_model_in_transformers(), chat_tokens)
    got = chunked(
        load_model(default_model_path(), "bfloat16", "cpu", kernels), chat_tokens, [len(chat_tokens)]
    )
    theirs = in_transformers(deepcopy(default_model_in_transformers()).to(torch.bfloat16), chat_tokens)
    assert (got - expected).std() < 1.1 * (theirs - expected).std()
