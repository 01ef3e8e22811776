"""The bodies clients may send."""

from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from app.conversation import Conversation
from app.errors import ApiError, invalid
from app.message import Message
from app.sampling_fields import MAX_LOGPROBS, SamplingFields
from app.strict import Strict
from app.unsupported import refuse_unsupported

Prompt = str | list[int]


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


class _CountedLogprobs(SamplingFields):
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs


class NativeBody(_CountedLogprobs, Conversation):
    """`POST /v1/requests`."""

    prompt: Annotated[Prompt, BeforeValidator(_check_prompt)] | None = None
    messages: list[Message] = Field(default_factory=list)

    @model_validator(mode="after")
    def _one_input(self) -> "NativeBody":
        if (self.prompt is None) == (not self.messages):
            raise ValueError("give either prompt or messages")
        return self


class StreamOptions(Strict):
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


class ChatBody(_Streamed, Conversation):
    """`POST /v1/chat/completions`. `max_tokens` is the older name of `max_completion_tokens`."""

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
SomeModel = TypeVar("SomeModel", bound=Strict)


def parse(kind: type[SomeBody], fields: dict[str, Any]) -> SomeBody:
    """The typed body of a request. Raises ApiError that names the first wrong field."""
    refuse_unsupported(fields)
    return validate(kind, fields)


def validate(kind: type[SomeModel], fields: dict[str, Any]) -> SomeModel:
    """Any typed body. Raises ApiError that names the first wrong field."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _first_problem(error) from None


def _first_problem(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False)[0]
    path = ".".join(str(part) for part in first["loc"] if not isinstance(part, str) or "[" not in part)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return invalid(f"{path} is required.", path or None, code="missing_required_parameter")
    return invalid(f"{path}: {message}." if path else f"{message}.", path or None)
