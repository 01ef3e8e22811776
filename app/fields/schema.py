"""The bodies clients may send."""

from collections.abc import Collection
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from app.fields.conversation import Conversation
from app.fields.message import Message
from app.fields.sampling_fields import MAX_LOGPROBS, SamplingFields
from app.fields.unsupported import is_one_of, refuse_unsupported, unsupported
from app.gateway.errors import ApiError, invalid
from app.gateway.strict import Strict

Prompt = str | list[int]
MAX_PROMPTS = 1_024
MAX_SAMPLES = 128


def _check_prompt(value: Any) -> Prompt:
    prompts = _check_prompts(value)
    if len(prompts) != 1:
        raise ValueError(f"holds {len(prompts)} prompts; one per request is allowed here")
    return prompts[0]


def _check_prompts(value: Any) -> list[Prompt]:
    several = isinstance(value, list) and value and isinstance(value[0], str | list)
    prompts = value if several else [value]
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"holds {len(prompts)} prompts; at most {MAX_PROMPTS} are allowed")
    kind = str if isinstance(prompts[0], str) else list
    if not all(isinstance(prompt, kind) for prompt in prompts):
        raise ValueError("must be a text, a list of token ids, or a list of several of either kind")
    # `type`, because a bool is an int to isinstance.
    if kind is list and not all(type(i) is int for prompt in prompts for i in prompt):
        raise ValueError("must be a text, a list of token ids, or a list of several of either kind")
    return prompts


class _Sampled(SamplingFields):
    """Several answers to one prompt."""

    n: int = Field(1, ge=1, le=MAX_SAMPLES)


class _CountedLogprobs(SamplingFields):
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs


class NativeBody(_CountedLogprobs, _Sampled, Conversation):
    """`POST /v1/requests`."""

    prompt: (
        Annotated[Prompt, BeforeValidator(_check_prompt, json_schema_input_type=Prompt | list[Prompt])] | None
    ) = None
    messages: list[Message] = Field(default_factory=list)

    @model_validator(mode="after")
    def _one_input(self) -> "NativeBody":
        if (self.prompt is None) == (not self.messages):
            raise ValueError("give either prompt or messages")
        for name in ("return_token_ids", "return_tokens_as_token_ids"):
            if getattr(self, name):
                raise unsupported(name, "poll with token_ids=1")
        return self


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False

    @model_validator(mode="after")
    def _no_obfuscation(self) -> "StreamOptions":
        if self.include_obfuscation:
            raise unsupported("stream_options.include_obfuscation")
        return self


class _Streamed(SamplingFields):
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> "_Streamed":
        if self.stream_options and not self.stream:
            raise ValueError("stream_options is allowed with stream: true only")
        if self.stream and self.prompt_logprobs is not None:
            raise invalid("prompt_logprobs is not allowed with stream: true.", "prompt_logprobs")
        return self


class CompletionBody(_CountedLogprobs, _Sampled, _Streamed):
    """`POST /v1/completions`. Of `best_of` samples the `n` of the highest mean log probability are shown."""

    prompts: Annotated[
        list[Prompt], BeforeValidator(_check_prompts, json_schema_input_type=Prompt | list[Prompt])
    ] = Field(alias="prompt")
    best_of: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    max_tokens: int | None = Field(None, ge=0, lt=1 << 31)
    echo: bool = False

    @model_validator(mode="after")
    def _something_to_answer(self) -> "CompletionBody":
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens 0 is allowed with echo: true only.", "max_tokens")
        return self

    @model_validator(mode="after")
    def _best_of_more(self) -> "CompletionBody":
        if self.samples < self.n:
            raise invalid(f"best_of {self.samples} is below n {self.n}.", "best_of")
        if self.stream and self.samples > self.n:
            raise invalid("best_of above n is not allowed with stream: true.", "best_of")
        return self

    @property
    def samples(self) -> int:
        """How many are drawn of each prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def logprobs_needed(self) -> int | None:
        return 0 if self.samples > self.n and self.logprobs is None else self.logprobs

    @property
    def output_tokens(self) -> int | None:
        wanted = super().output_tokens
        return wanted or (16 if self.max_tokens is None else self.max_tokens)

    @property
    def prompt_logprobs_wanted(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        return max((wanted for wanted in (echoed, self.prompt_logprobs) if wanted is not None), default=None)


class ChatBody(_Sampled, _Streamed, Conversation):
    """`POST /v1/chat/completions`."""

    echo: bool = False
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is allowed with logprobs: true only")
        return self

    @property
    def echoed_text(self) -> str:
        """With `echo`, the assistant's message that the answer goes on with."""
        last = self.messages[-1]
        return last.text if self.echo and last.role == "assistant" else ""

    @property
    def top_logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


SomeModel = TypeVar("SomeModel", bound=Strict)


def parse(kind: type[SomeModel], fields: dict[str, Any]) -> SomeModel:
    """The typed body of a request for text. Raises ApiError that names the first wrong field."""
    known = names(kind)
    refuse_unsupported(fields, known)
    refuse_misplaced(fields, known)
    return validate(kind, fields)


def names(kind: type[Strict]) -> set[str]:
    """What clients call the fields of a body."""
    return {field.alias or name for name, field in kind.model_fields.items()}


def refuse_misplaced(fields: dict[str, Any], known: Collection[str]) -> None:
    """Raises ApiError for the first field that means something in another body, and nothing where only the
    `known` do, unless its value is its default."""
    for name, value in fields.items():
        if name in _DEFAULTS and name not in known and not is_one_of(value, _DEFAULTS[name]):
            raise unsupported(name, _INSTEAD.get(name, "leave it out"))


def _defaults() -> dict[str, list[Any]]:
    """Of every field of the bodies that ask for text."""
    found: dict[str, list[Any]] = {}
    for kind in (NativeBody, CompletionBody, ChatBody):
        for name, field in kind.model_fields.items():
            found.setdefault(field.alias or name, []).append(field.get_default(call_default_factory=True))
    return found


_DEFAULTS = _defaults()
_INSTEAD = {
    "stream": "follow the stream among the links of the answer",
    "top_logprobs": "logprobs is their number",
}


def validate(kind: type[SomeModel], fields: dict[str, Any]) -> SomeModel:
    """Any typed body. Raises ApiError that names the first wrong field."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _first_problem(error) from None


def _first_problem(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False)[0]
    # Of a union the last part names the type that was tried first.
    parts = first["loc"][:-1] if first["loc"][-1:] == ("str",) else first["loc"]
    path = ".".join(str(part) for part in parts if not isinstance(part, str) or "[" not in part)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return invalid(f"{path} is required.", path or None, code="missing_required_parameter")
    return invalid(f"{path}: {message}." if path else f"{message}.", path or None)
