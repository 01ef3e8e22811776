"""The bodies clients may send. Types are strict, "1" is no number; unknown fields are ignored."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from app.errors import ApiError, invalid
from relay.request import MAX_PRIORITY
from relay.sampling import SamplingParams

Prompt = str | list[int]
MAX_LOGPROBS = 20
MAX_STOPS = 4

# Fields that would change the result and are not implemented yet, with the values that change nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "ebnf": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "lora_path": (),
    "modalities": (["text"],),
    "n": (1,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "regex": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": (),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}


def _check_prompt(value: Any) -> Prompt:
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise ValueError(f"holds {len(value)} prompts; one per request is supported yet")
        value = value[0]
    if isinstance(value, str):
        return value
    # `type`, because a bool is an int to isinstance.
    if isinstance(value, list) and all(type(i) is int for i in value):
        return value
    raise ValueError("must be a text, a list of token ids, or a list of exactly one of these")


def _check_stop(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a text or a list of texts")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"holds {len(stops)} texts; at most {MAX_STOPS} are allowed")
    if not all(stops):
        raise ValueError("must not hold an empty text")
    return stops


def _check_logit_bias(value: Any) -> Any:
    if not isinstance(value, dict) or not all(_is_token_id(token) for token in value):
        raise ValueError("must be an object with token ids as keys")
    return {int(token): bias for token, bias in value.items()}


def _is_token_id(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _check_content(value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a text or a list of text parts")
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError('may hold parts of the form {"type": "text", "text": ...} only')
    return "".join(part["text"] for part in value)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    text: Annotated[str, BeforeValidator(_check_content)] = Field(alias="content")
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_tools(cls, data: Any) -> Any:
        if isinstance(data, dict) and (data.get("tool_calls") or data.get("function_call")):
            raise ValueError("tool calls are not supported yet")
        return data


class SamplingFields(_Strict):
    """What all bodies share. `logprobs` differs, and so do the names of `max_tokens`."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    min_tokens: int = Field(0, ge=0, lt=1 << 31)
    temperature: float = Field(1.0, ge=0, le=2)
    top_k: int = Field(0, ge=-1, lt=1 << 31)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[
        dict[int, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_check_logit_bias)
    ] = Field(default_factory=dict)
    stop: Annotated[list[str], BeforeValidator(_check_stop)] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)

    @property
    def output_tokens(self) -> int | None:
        """The limit on output tokens that the client set."""
        return self.max_tokens

    @property
    def top_logprobs_wanted(self) -> int | None:
        """Alternatives to report per token, None: no logprobs at all."""
        raise NotImplementedError

    def params(self, max_tokens: int, seed: int, vocab_size: int) -> SamplingParams:
        """What the sampler needs. `seed` is used unless the client sent one. Raises ApiError."""
        if self.min_tokens > max_tokens:
            raise invalid(f"min_tokens {self.min_tokens} is above max_tokens {max_tokens}.", "min_tokens")
        for param, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            if any(not 0 <= i < vocab_size for i in ids):
                raise invalid(f"{param} names a token outside the vocabulary of {vocab_size}.", param)
        greedy = self.temperature < 1e-5
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=0.0 if greedy else self.temperature,
            top_k=0 if greedy else max(self.top_k, 0),
            top_p=1.0 if greedy else self.top_p,
            min_p=0.0 if greedy else self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            logprobs=self.top_logprobs_wanted,
            seed=(seed if self.seed is None else self.seed) % (1 << 63),
            skip_special_tokens=self.skip_special_tokens,
        )


class _CountedLogprobs(SamplingFields):
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs


class NativeBody(_CountedLogprobs):
    """`POST /v1/requests`. `timeout` in seconds."""

    prompt: Annotated[Prompt, BeforeValidator(_check_prompt)] | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    timeout: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _one_input(self) -> "NativeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class StreamOptions(_Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Streamed(SamplingFields):
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> "_Streamed":
        if self.stream_options and not self.stream:
            raise ValueError("stream_options is allowed with stream: true only")
        return self


class CompletionBody(_CountedLogprobs, _Streamed):
    """`POST /v1/completions`."""

    prompt: Annotated[Prompt, BeforeValidator(_check_prompt)]

    @property
    def output_tokens(self) -> int | None:
        return self.max_tokens or 16


class ChatBody(_Streamed):
    """`POST /v1/chat/completions`. `max_tokens` is the older name of `max_completion_tokens`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is allowed with logprobs: true only")
        return self

    @property
    def output_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def top_logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


SomeBody = TypeVar("SomeBody", bound=SamplingFields)


def parse(kind: type[SomeBody], fields: dict[str, Any]) -> SomeBody:
    """The typed body. Raises ApiError that names the first wrong field."""
    for name, harmless in UNSUPPORTED.items():
        if name in fields and not any(_same(fields[name], value) for value in harmless):
            raise invalid(_refusal(name), name, code="unsupported_parameter")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _first_problem(error) from None


def _same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and bool(left == right)


def _refusal(name: str) -> str:
    if name == "n":
        return "n must be 1: several samples of one prompt are not supported yet."
    return f"{name} is not supported yet: leave it out."


def _first_problem(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False)[0]
    path = ".".join(str(part) for part in first["loc"] if not isinstance(part, str) or "[" not in part)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return invalid(f"{path} is required.", path or None, code="missing_required_parameter")
    return invalid(f"{path}: {message}." if path else f"{message}.", path or None)
