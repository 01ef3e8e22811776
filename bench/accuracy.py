"""What the forms of weights cost: perplexity of a fixed text and the tokens chosen, against float32.

A form is measured twice, since few and many rows are computed in different ways: the text as one prompt, and
token by token. `shuffled` reorders the channels of the model, which changes nothing but which values share a
scale: weights that were quantized before are no longer on a grid that four bits could hit again.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from app.measure.table import show
from kernels import AttentionBatch
from kernels.cpu import CpuKernels
from kernels.quantized_matrix import QuantizedMatrix
from relay.model_card import read_architecture
from relay.model_file import resolve_model
from relay.settings import Settings
from relay.tokenizer import Tokenizer
from workers.engine.kv_pool import KVPool
from workers.models import Model, ModelConfig
from workers.models.registry import ARCHITECTURES, DTYPES
from workers.models.weights import WeightLoader, WeightSource, open_weights

TEXT = Path(__file__).parent / "text.txt"
PAGE_SIZE = 16
PROMPTS = 8
PROMPT_TOKENS = 48
GREEDY_TOKENS = 48


class Form(NamedTuple):
    name: str
    dtype: str
    weights: str
    shuffled: bool = False


EXACT = Form("float32", "float32", "dtype")
FORMS = [
    Form("bfloat16", "bfloat16", "dtype"),
    Form("the file's", "bfloat16", "file"),
    Form("int8", "bfloat16", "int8"),
    Form("int4", "bfloat16", "int4"),
    Form("int8, shuffled", "bfloat16", "int8", shuffled=True),
    Form("int4, shuffled", "bfloat16", "int4", shuffled=True),
]


class Outcome(NamedTuple):
    """Log probabilities `[T, vocab]` of the text, as a prompt and token by token; what follows its parts."""

    prompt: Tensor
    by_token: Tensor
    greedy: list[list[int]]


class Shuffled:
    """A source whose model has its hidden channels, and those of each MLP, in another order."""

    def __init__(self, source: WeightSource, config: ModelConfig) -> None:
        generator = torch.Generator().manual_seed(0)
        self._source = source
        self._hidden = torch.randperm(config.hidden_size, generator=generator)
        self._intermediate = torch.randperm(config.intermediate_size, generator=generator)
        self.names, self.kind = source.names, source.kind

    def read(self, name: str) -> Tensor:
        tensor, module = self._source.read(name), name.split(".")[-2]
        match module:
            case "q_proj" | "k_proj" | "v_proj" | "embed_tokens" | "lm_head":
                return tensor[..., self._hidden] if tensor.ndim == 2 else tensor
            case "gate_proj" | "up_proj":
                return tensor[self._intermediate][:, self._hidden]
            case "down_proj":
                return tensor[self._hidden][:, self._intermediate]
            case "o_proj" | "input_layernorm" | "post_attention_layernorm" | "norm":
                return tensor[self._hidden]
        return tensor

    def read_quantized(self, name: str) -> QuantizedMatrix | None:
        return None


def run() -> None:
    path = Settings.from_env().model_path
    tokens = torch.tensor(Tokenizer.load(path).encode(TEXT.read_text()))
    exact = _outcome(path, EXACT, tokens)
    rows = [(form.name, *_compare(_outcome(path, form, tokens), exact, tokens)) for form in FORMS]
    in_float32 = f"perplexity in float32 {_perplexity(exact.prompt, tokens):.3f}"
    title = f"{Path(path).name}: {len(tokens)} tokens, {in_float32}"
    header = (
        "weights",
        "perplexity",
        "% more",
        "same best %",
        "by token",
        "% more",
        "same best %",
        "greedy equal %",
    )
    show(title, header, rows)


def _compare(found: Outcome, exact: Outcome, tokens: Tensor) -> Sequence[float]:
    expected, best = _perplexity(exact.prompt, tokens), exact.prompt.argmax(-1)
    numbers: list[float] = []
    for logs in (found.prompt, found.by_token):
        perplexity = _perplexity(logs, tokens)
        same = (logs.argmax(-1) == best).float().mean().item()
        numbers += (perplexity, 100 * (perplexity / expected - 1), 100 * same)
    equal = [_equal_tokens(a, b) for a, b in zip(found.greedy, exact.greedy, strict=True)]
    return *numbers, 100 * sum(equal) / (PROMPTS * GREEDY_TOKENS)


def _perplexity(logs: Tensor, tokens: Tensor) -> float:
    return F.nll_loss(logs[:-1], tokens[1:]).exp().item()


def _equal_tokens(a: list[int], b: list[int]) -> int:
    """How many tokens come before the first that differs."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def _outcome(path: str, form: Form, tokens: Tensor) -> Outcome:
    model = _load(path, form)
    starts = torch.linspace(0, len(tokens) - PROMPT_TOKENS, PROMPTS).long()
    return Outcome(
        _logs(model, tokens, len(tokens)),
        _logs(model, tokens, 1),
        [_greedy(model, tokens[start : start + PROMPT_TOKENS]) for start in starts],
    )


def _load(path: str, form: Form) -> Model:
    file = resolve_model(path)
    config = ModelConfig.load(file)
    source = open_weights(file, config)
    loader = WeightLoader(
        Shuffled(source, config) if form.shuffled else source,
        DTYPES[form.dtype],
        torch.device("cpu"),
        form.weights,
    )
    return ARCHITECTURES[read_architecture(file)](config, loader, CpuKernels())


class _Session:
    """One request in a pool of its own."""

    def __init__(self, model: Model, tokens: int) -> None:
        self._model = model
        self._pages = list(range(-(-tokens // PAGE_SIZE)))
        self._kv = KVPool.allocate(
            model.config.kv_shape(len(self._pages), PAGE_SIZE), model.dtype, model.device
        )
        self._done = 0

    def step(self, tokens: Tensor) -> Tensor:
        """Logits of every token."""
        start, self._done = self._done, self._done + len(tokens)
        batch = AttentionBatch([len(tokens)], [self._done], [self._pages], PAGE_SIZE)
        plan = self._model.kernels.plan(batch, self._model.device)
        positions = torch.arange(start, self._done)
        return self._model.forward(tokens, positions, self._kv.tensor, plan, None, torch.arange(len(tokens)))


def _logs(model: Model, tokens: Tensor, tokens_a_step: int) -> Tensor:
    session = _Session(model, len(tokens))
    return torch.cat([session.step(part) for part in tokens.split(tokens_a_step)]).log_softmax(-1)


def _greedy(model: Model, prompt: Tensor) -> list[int]:
    session = _Session(model, len(prompt) + GREEDY_TOKENS)
    chosen = [int(session.step(prompt)[-1].argmax())]
    while len(chosen) < GREEDY_TOKENS:
        chosen.append(int(session.step(torch.tensor(chosen[-1:]))[0].argmax()))
    return chosen
