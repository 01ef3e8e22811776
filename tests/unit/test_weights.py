"""Weight files: quantizations, and what is said about files that are missing, broken or strange."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from kernels import load_kernels
from relay.gguf import read_gguf_head
from relay.model_card import ModelCard, read_model_card
from relay.model_file import ModelError, default_model_path, fingerprint, resolve_model, served_name
from tests.gguf_tensor import random_blocks, write_tensor
from tests.models import random_model, save_directory, save_gguf
from workers.models import Model, load_model

KERNELS = load_kernels("reference")
Kind = gguf.GGMLQuantizationType

# Largest error of a value of standard normal weights, from the bits each kind keeps.
QUANTIZERS = {
    Kind.F32: 0.0,
    Kind.F16: 0.002,
    Kind.BF16: 0.02,
    Kind.Q8_0: 0.03,
    Kind.Q5_1: 0.2,
    Kind.Q5_0: 0.3,
    Kind.Q4_1: 0.4,
    Kind.Q4_0: 0.6,
}


def load(path: Path) -> Model:
    return load_model(path, "float32", "cpu", KERNELS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_directory(random_model("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(random_model("llama"), tmp_path_factory.mktemp("gguf") / "small-llama.gguf")


@pytest.fixture
def copy(directory: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(directory, tmp_path / "copy"))


def edit_config(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kind", QUANTIZERS, ids=lambda kind: kind.name)
def test_quantized_tensor_is_what_was_stored(kind: Kind, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((3, 256), dtype=np.float32)
    stored = gguf.quants.quantize(values, kind)
    got = write_tensor(tmp_path / "one.gguf", stored, kind).read("model.embed_tokens.weight")
    assert got.shape == (3, 256)
    assert np.array_equal(got.float().numpy(), gguf.quants.dequantize(stored, kind))
    assert np.abs(got.float().numpy() - values).max() <= QUANTIZERS[kind]


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K], ids=lambda kind: kind.name)
def test_k_quants(kind: Kind, tmp_path: Path) -> None:
    blocks = random_blocks(kind, 3)
    got = write_tensor(tmp_path / "one.gguf", blocks, kind).read("model.embed_tokens.weight")
    assert got.shape == (3, 512)
    assert got.std() > 0
    assert np.array_equal(got.numpy(), gguf.quants.dequantize(blocks, kind))


def test_q6_k_block_by_hand(tmp_path: Path) -> None:
    # d = 0.5 at the end, scale of the first group 3, all others 1; every quant 32 (zero) but the first, 33.
    block = np.zeros((1, 210), dtype=np.uint8)
    block[0, 128:192] = 0b10101010  # the high bits of all quants: 2 of 3, so 32
    block[0, 192:208] = 1
    block[0, 192] = 3
    block[0, 208:] = np.frombuffer(np.float16(0.5).tobytes(), dtype=np.uint8)
    block[0, 0] = 0x01
    got = write_tensor(tmp_path / "one.gguf", block, Kind.Q6_K).read("model.embed_tokens.weight")
    assert got[0, 0] == 0.5 * 3 * 1
    assert torch.count_nonzero(got) == 1


def test_unsupported_quantization_is_named(tmp_path: Path) -> None:
    data = np.zeros((1, 2 * gguf.GGML_QUANT_SIZES[Kind.Q2_K][1]), dtype=np.uint8)
    with pytest.raises(ModelError, match=r"Q2_K, known are: .*Q4_0"):
        write_tensor(tmp_path / "one.gguf", data, Kind.Q2_K)


def test_own_gguf_reader_agrees_with_the_gguf_package() -> None:
    head = read_gguf_head(default_model_path())
    reader = gguf.GGUFReader(default_model_path())
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert head.metadata == theirs
    assert len(head.tensors) == len(reader.tensors)
    for tensor in reader.tensors:
        ours = head.tensors[tensor.name]
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert (ours.kind, ours.offset) == (tensor.tensor_type, tensor.data_offset)


def test_card_of_the_default_model() -> None:
    card = read_model_card(default_model_path())
    assert card == ModelCard("SmolLM2-135M-Instruct.Q4_1", "llama", 8192, 49152, card.fingerprint)
    assert len(card.fingerprint) == 16


def test_card_of_a_directory(directory: Path) -> None:
    card = read_model_card(directory)
    assert card[1:4] == ("LlamaForCausalLM", 256, 131)
    assert card.name == directory.name


def test_fingerprint_follows_content_not_names_or_times(directory: Path, copy: Path, tmp_path: Path) -> None:
    assert fingerprint(copy) == fingerprint(directory)
    other = save_directory(random_model("llama", seed=1), tmp_path / "other")
    assert fingerprint(other) != fingerprint(directory)
    edit_config(copy, rms_norm_eps=1e-3)
    assert fingerprint(copy) != fingerprint(directory)


def test_directory_with_one_gguf_file_means_that_file(gguf_file: Path, tmp_path: Path) -> None:
    assert resolve_model(gguf_file.parent) == gguf_file
    assert served_name(gguf_file) == "small-llama"
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(gguf_file, tmp_path / name)
    with pytest.raises(ModelError, match="2 GGUF files"):
        resolve_model(tmp_path)


def test_no_model_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        load(tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"neither config.json nor a .gguf"):
        load(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="is not a model"):
        load(tmp_path / "model.bin")


def test_unknown_architecture_lists_the_known(copy: Path) -> None:
    edit_config(copy, architectures=["GPT2LMHeadModel"])
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel.*LlamaForCausalLM.*Qwen3ForCausalLM"):
        load(copy)
    edit_config(copy, architectures=None)
    with pytest.raises(ModelError, match="names no architecture"):
        load(copy)


def test_unknown_dtype_lists_the_known(directory: Path) -> None:
    with pytest.raises(ModelError, match=r"int8.*float32, bfloat16, float16"):
        load_model(directory, "int8", "cpu", KERNELS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial"),
        ({"num_key_value_heads": 3}, "cannot share 3"),
    ],
)
def test_config_that_cannot_be_served(copy: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(copy, **changes)
    with pytest.raises(ModelError, match=message):
        load(copy)


def test_config_without_a_key_names_it(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    del config["hidden_size"]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="hidden_size"):
        load(copy)


def test_config_that_is_not_json(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        load(copy)


def test_missing_weights_file(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors is missing"):
        load(copy)


def test_missing_shard(tmp_path: Path) -> None:
    save_directory(random_model("llama"), tmp_path, max_shard_size="60KB")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-\d+\.safetensors is missing"):
        load(tmp_path)


def test_truncated_safetensors(copy: Path) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cut short"):
        load(copy)


def test_wrong_shape(copy: Path) -> None:
    edit_config(copy, intermediate_size=100)
    with pytest.raises(ModelError, match=r"gate_proj.weight has shape \[96, 64\].*\[100, 64\]"):
        load(copy)


def test_missing_and_surplus_tensors(tmp_path: Path) -> None:
    save_directory(random_model("qwen2"), tmp_path / "qwen2")
    edit_config(tmp_path / "qwen2", architectures=["LlamaForCausalLM"])
    with pytest.raises(ModelError, match=r"9 tensors that its architecture does not use.*_proj\.bias"):
        load(tmp_path / "qwen2")
    save_directory(random_model("llama"), tmp_path / "llama")
    edit_config(tmp_path / "llama", architectures=["Qwen2ForCausalLM"])
    with pytest.raises(ModelError, match=r"lacks the tensor .*q_proj\.bias"):
        load(tmp_path / "llama")


def test_untied_model_without_a_head(tmp_path: Path) -> None:
    save_directory(random_model("llama", tie_word_embeddings=True), tmp_path)
    edit_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"lacks the tensor lm_head\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("kept", [0, 3, 30, 400, -50])
def test_truncated_gguf(gguf_file: Path, tmp_path: Path, kept: int) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(gguf_file.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"not a readable GGUF file|cut short"):
        load(cut)


def test_file_that_is_not_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGML" + bytes(100))
    with pytest.raises(ModelError, match="does not start with GGUF"):
        load(tmp_path / "model.gguf")
