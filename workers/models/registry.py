"""From a model on disk to one that runs."""

import os

import torch

from kernels.base import Kernels
from relay.model_card import read_architecture
from relay.model_file import ModelError, resolve_model
from workers.models.config import ModelConfig
from workers.models.llama import Llama
from workers.models.model import Model
from workers.models.qwen2 import Qwen2
from workers.models.qwen3 import Qwen3
from workers.models.weights import FORMS, WeightLoader, open_weights

# By the name in config.json, then by the name in GGUF.
ARCHITECTURES: dict[str, type[Model]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Llama,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
    "llama": Llama,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def weight_form(weights: str, dtype: str, kernels: Kernels) -> str:
    """What `weights`, as the setting WEIGHTS has it, means: one of `FORMS`.

    "auto" is the file's own form where the kernels compute with it, unless float32 asks for exactness.
    """
    if weights != "auto":
        return weights
    return "file" if kernels.keeps_quantized and dtype == "bfloat16" else "dtype"


def load_model(
    path: str | os.PathLike[str],
    dtype: str,
    device: torch.device | str,
    kernels: Kernels,
    weights: str = "dtype",
) -> Model:
    """Load the model at `path`, a GGUF file or a Hugging Face directory.

    `dtype` is "float32", "bfloat16" or "float16", for activations, KV and what is not quantized; `weights` is
    "auto" or one of `FORMS`. Raises ModelError that says what is missing, broken or unknown.
    """
    form = weight_form(weights, dtype, kernels)
    if form not in FORMS:
        raise ModelError(f"unknown weights {weights!r}: set WEIGHTS to auto or one of {', '.join(FORMS)}")
    if form != "dtype" and torch.device(device).type != "cpu":
        raise ModelError(f"WEIGHTS={weights} is for CPUs: set WEIGHTS=dtype on {device}")
    if dtype not in DTYPES:
        raise ModelError(f"unknown dtype {dtype!r}: set DTYPE to one of {', '.join(DTYPES)}")
    path = resolve_model(path)
    architecture = read_architecture(path)
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"architecture {architecture!r} is not supported, known are: {', '.join(ARCHITECTURES)}"
        )
    config = ModelConfig.load(path)
    loader = WeightLoader(open_weights(path, config), DTYPES[dtype], torch.device(device), form)
    return ARCHITECTURES[architecture](config, loader, kernels)
