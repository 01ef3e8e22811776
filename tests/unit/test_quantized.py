"""Quantized matrices: what is kept of their values, and products and models in few bits."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kernels import Kernels
from kernels.cpu import CpuKernels, NativePass, usable_isas
from kernels.quantized_matrix import GROUP, QuantizedMatrix
from relay.model_file import ModelError, default_model_path
from relay.tokenizer import Tokenizer
from tests.engine_rig import Relay, Rig, relayed, unified
from tests.kernel_sets import ALL, FASTEST, kernels_called
from tests.model_session import chunked, random_tokens
from tests.models import random_model, save_directory
from workers.engine.kv_pool import KVPool
from workers.models import load_model
from workers.models.registry import weight_form


@pytest.fixture(params=ALL)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_called(request.param)


def random_values(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    """Groups of very unequal size, some of them zero, and one far from zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(outputs, inputs // GROUP, GROUP, generator=generator)
    values *= torch.logspace(-4, 2, outputs).view(-1, 1, 1)
    values[::3, 0] = 0
    values[1 % outputs, -1] += 50
    return values.view(outputs, inputs)


def group_errors(found: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The largest error of each group, and its groups."""
    groups = values.view(len(values), -1, GROUP)
    return (found.view_as(groups) - groups).abs().amax(-1), groups


def test_eight_bits_keep_a_254th_of_the_largest() -> None:
    values = random_values(24, 96)
    errors, groups = group_errors(QuantizedMatrix.quantize(values, 8).dense(torch.float32), values)
    # Half a step, and what float16 takes off the scale, which counts most for the largest code.
    assert (errors <= groups.abs().amax(-1) * (1 / 254 + 2**-10) + 1e-6).all()


def test_four_bits_keep_a_30th_of_the_range() -> None:
    values = random_values(24, 96)
    errors, groups = group_errors(QuantizedMatrix.quantize(values, 4).dense(torch.float32), values)
    span = groups.amax(-1) - groups.amin(-1)
    assert (errors <= span / 30 + groups.abs().amax(-1) * 2**-9 + 1e-6).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_what_was_quantized_is_quantized_without_loss(bits: int) -> None:
    once = QuantizedMatrix.quantize(random_values(8, 64), bits)
    assert once.bits == bits
    assert once.shape == (8, 64)
    again = QuantizedMatrix.quantize(once.dense(torch.float32), bits)
    torch.testing.assert_close(again.dense(torch.float32), once.dense(torch.float32), rtol=2e-3, atol=1e-6)


def test_a_stack_keeps_equal_parts_and_widens_others() -> None:
    few = QuantizedMatrix.quantize(random_values(6, 64), 4)
    many = QuantizedMatrix.quantize(random_values(6, 64, seed=1), 8)
    equal = QuantizedMatrix.stack([few, few])
    assert equal.bits == 4
    assert torch.equal(equal.dense(torch.float32), few.dense(torch.float32).repeat(2, 1))
    mixed = QuantizedMatrix.stack([few, many])
    assert mixed.bits == 8
    assert torch.equal(mixed.dense(torch.float32)[6:], many.dense(torch.float32))
    errors, groups = group_errors(mixed.dense(torch.float32)[:6], few.dense(torch.float32))
    assert (errors <= groups.abs().amax(-1) * (1 / 254 + 2**-10) + 1e-6).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 2, 5, 17, 32, 33, 70])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (15, 64), (33, 96), (131, 320)])
def test_product_with_a_quantized_matrix(
    kernels: Kernels, bits: int, rows: int, outputs: int, inputs: int
) -> None:
    generator = torch.Generator().manual_seed(rows * inputs)
    x = torch.randn(rows, inputs, generator=generator) * torch.logspace(-2, 2, inputs)
    matrix = QuantizedMatrix.quantize(random_values(outputs, inputs, rows), bits)
    bias = torch.randn(outputs, generator=generator)
    exact = x.double() @ matrix.dense(torch.float64).T
    # Activations keep 16 bits of a group's largest: what that is to a sum, the sizes of its terms say.
    terms = x.double().abs() @ matrix.dense(torch.float64).abs().T
    error = (kernels.linear(x, matrix, bias).double() - exact - bias).abs()
    assert (error <= terms * 1e-4 + bias.abs() * 1e-6 + 1e-9).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [3, 40])
def test_product_in_bfloat16(kernels: Kernels, bits: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 320, generator=generator).bfloat16()
    matrix = QuantizedMatrix.quantize(random_values(50, 320, rows), bits)
    terms = x.double().abs() @ matrix.dense(torch.float64).abs().T
    error = (kernels.linear(x, matrix).double() - x.double() @ matrix.dense(torch.float64).T).abs()
    assert (error <= terms * 2**-7).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("isa", usable_isas())
@pytest.mark.parametrize(("outputs", "inputs"), [(15, 64), (50, 320)])
def test_a_product_of_few_rows_depends_on_its_row_alone(
    isa: str, bits: int, outputs: int, inputs: int
) -> None:
    """A decoded token is the same to the bit whatever else is in its batch."""
    kernels = kernels_called(isa)
    x = torch.randn(32, inputs, generator=torch.Generator().manual_seed(inputs)).bfloat16()
    matrix = QuantizedMatrix.quantize(random_values(outputs, inputs), bits)
    alone = torch.cat([kernels.linear(row, matrix) for row in x.split(1)])
    for rows in (2, 3, 4, 7, 8, 9, 15, 16, 17, 24, 25, 31, 32):
        assert torch.equal(kernels.linear(x[:rows], matrix), alone[:rows])


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_no_number_shows_in_the_product(kernels: Kernels, rows: int, broken: float) -> None:
    matrix = QuantizedMatrix.quantize(random_values(20, 64), 8)
    x = torch.ones(rows, 64)
    x[0, 40] = broken
    assert not kernels.linear(x, matrix)[0].isfinite().all()
    assert kernels.linear(x, matrix)[1:].isfinite().all()


class Saved(NamedTuple):
    """A random model in a directory, and its logits by plain torch."""

    directory: Path
    expected: Tensor


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Saved]:
    """One for each form and shape, whatever it is compared with."""

    @cache
    def save(form: str, family: str, **shape: Any) -> Saved:
        directory = save_directory(random_model(family, **shape), tmp_path_factory.mktemp(family))
        return Saved(directory, logits(directory, "reference", form))

    return save


def logits(directory: Path, kernels: str, form: str) -> Tensor:
    """Prompts of many rows, of few, and decodes."""
    return chunked(
        load_model(directory, "float32", "cpu", kernels_called(kernels), form), random_tokens(), [35, 6]
    )


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("isa", usable_isas())
def test_model_equals_the_reference_with_the_same_weights(
    saved: Callable[..., Saved], isa: str, form: str, family: str, tied: bool
) -> None:
    directory, expected = saved(form, family, tie_word_embeddings=tied)
    torch.testing.assert_close(logits(directory, isa, form), expected, atol=3e-3, rtol=3e-3)


def test_packed_weights_take_the_bits_they_have(tmp_path: Path) -> None:
    directory = save_directory(random_model("llama"), tmp_path)
    sizes = {}
    for form in ("dtype", "int8", "int4"):
        packed = load_model(directory, "bfloat16", "cpu", CpuKernels(threads=1), form).forward_pass
        assert isinstance(packed, NativePass)
        sizes[form] = packed.weight_bytes
    # Bits per weight: 12 without loss, 8.5, and 5, but 8.5 in the embedding and the head.
    assert sizes["int8"] < sizes["dtype"] * 8.6 / 12
    assert sizes["int4"] < sizes["int8"]


@pytest.mark.parametrize("isa", usable_isas())
def test_columns_that_are_no_whole_groups_stay_in_the_dtype(saved: Callable[..., Saved], isa: str) -> None:
    directory, expected = saved("int8", "llama", hidden_size=80, head_dim=24)
    torch.testing.assert_close(logits(directory, isa, "int8"), expected, atol=3e-3, rtol=3e-3)


def test_auto_is_the_form_of_the_file_where_bfloat16_was_asked_for() -> None:
    reference, compiled = kernels_called("reference"), kernels_called(FASTEST[1])
    assert weight_form("auto", "bfloat16", compiled) == "file"
    assert weight_form("auto", "float32", compiled) == "dtype"
    assert weight_form("auto", "bfloat16", reference) == "dtype"
    assert weight_form("int4", "float32", reference) == "int4"


def test_unknown_weights_list_the_known_and_a_gpu_refuses_them(tmp_path: Path) -> None:
    compiled = kernels_called(FASTEST[1])
    with pytest.raises(ModelError, match=r"int3.*auto.*int8"):
        load_model(tmp_path, "bfloat16", "cpu", compiled, "int3")
    with pytest.raises(ModelError, match="WEIGHTS=dtype"):
        load_model(tmp_path, "bfloat16", "cuda", kernels_called("reference"), "int8")


@pytest.mark.parametrize("isa", [usable_isas()[0], "avx2"])
def test_engines_serve_the_default_model_in_the_bits_of_its_file(isa: str) -> None:
    if isa not in usable_isas():
        pytest.skip(f"this machine has no {isa}")
    tokenizer = Tokenizer.load(default_model_path())
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    model = load_model(default_model_path(), "bfloat16", "cpu", kernels_called(isa), "auto")

    def rig() -> Rig:
        kv = KVPool.allocate(model.config.kv_shape(40, page_size=4), model.dtype, model.device)
        return Rig(model=model, kv=kv, context_tokens=150, chunk_tokens=24)

    alone = rig()
    alone.submit(unified("a", ids, 9))
    alone.run()
    assert "Paris" in tokenizer.decode(alone.text("a"))
    relay, leg = Relay(rig(), rig()), relayed("a", ids, 9)
    relay.reserve(leg)
    relay.prefill.submit(leg)
    relay.prefill.run()
    relay.finish(leg)
    relay.decode.run()
    assert relay.decode.text("a") == alone.text("a")
