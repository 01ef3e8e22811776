"""What clients send to /v1/responses, and the same as a chat."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import Field, model_validator

from app.fields.conversation import Conversation
from app.fields.schema import ChatBody, StreamOptions, names, parse, refuse_misplaced, validate
from app.fields.unsupported import refuse_unsupported, unsupported
from app.gateway.errors import ApiError, invalid
from app.gateway.metadata import Metadata
from app.gateway.strict import Strict
from app.response.response_items import Item, messages_of

LOGPROBS = "message.output_text.logprobs"
_INCLUDE = (LOGPROBS, "reasoning.encrypted_content")  # no model here has reasoning of that kind
_NOT_SUPPORTED = (
    *("conversation", "prompt", "max_tool_calls", "context_management", "moderation"),
    *("background_options", "image", "previous_input_messages", "enable_response_messages"),
    # What a chat would show beside its text, and an answer here has no place for.
    *("logprobs", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids", "echo", "n"),
)
# Of a chat, under another name here.
_INSTEAD = {
    "messages": "send input",
    "max_tokens": "send max_output_tokens",
    "max_completion_tokens": "send max_output_tokens",
    "response_format": "send text.format",
}
# Fields of a chat that mean the same here: those of the sampler and of the template.
_SHARED = set(Conversation.model_fields) - {*_INSTEAD, "tools", "tool_choice", "parallel_tool_calls"}


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    body: dict[str, Any] | None = Field(default=None, alias="schema")


class TextOptions(Strict):
    form: TextFormat = Field(default_factory=TextFormat, alias="format")
    verbosity: Literal["medium"] | None = None


class Reasoning(Strict):
    effort: str | None = None
    summary: str | None = None


class ResponseChat(ChatBody):
    """The chat behind a response."""

    strict_unless_said = True


class ResponseBody(Strict):
    """`POST /v1/responses`: what is not of a chat. The rest goes to the chat as it is."""

    model: str | None = None
    input: str | list[Any]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    background: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    metadata: Metadata = Field(default_factory=dict)
    max_output_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    truncation: Literal["auto", "disabled"] = "disabled"
    text: TextOptions = Field(default_factory=TextOptions)
    reasoning: Reasoning = Field(default_factory=Reasoning)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    include: list[str] = Field(default_factory=list)
    top_logprobs: int = Field(0, ge=0, le=20)
    user: str | None = None

    @model_validator(mode="after")
    def _background_is_stored(self) -> "ResponseBody":
        if self.background and not self.store:
            raise ValueError("background: true needs store: true")
        if self.stream_options and not self.stream:
            raise ValueError("stream_options is allowed with stream: true only")
        if self.stream_options and self.stream_options.continuous_usage_stats:
            raise unsupported("stream_options.continuous_usage_stats", "the last event has the usage")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in self.include or self.top_logprobs > 0

    @property
    def echo(self) -> dict[str, Any]:
        """The fields that an answer repeats."""
        form = self.text.form.model_dump(by_alias=True, exclude_none=True)
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata,
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": self.previous_response_id,
            "reasoning": self.reasoning.model_dump(),
            "store": self.store,
            "text": {"format": form},
            "tool_choice": self.tool_choice,
            "tools": self.tools,
            "top_logprobs": self.top_logprobs,
            "truncation": self.truncation,
            "user": self.user,
        }


def parse_response(fields: dict[str, Any]) -> ResponseBody:
    """Raises ApiError that names the first wrong field."""
    refuse_unsupported(fields, ())
    for name in (*_NOT_SUPPORTED, *_INSTEAD):
        if fields.get(name, False) is not False and (name, fields[name]) != ("n", 1):
            raise unsupported(name, _INSTEAD.get(name, "leave it out"))
    refuse_misplaced(fields, _SHARED | names(ResponseBody))
    body = validate(ResponseBody, fields)
    for name in body.include:
        check_included(name)
    return body


def check_included(name: str) -> None:
    """Raises ApiError for what no response can include."""
    if name not in _INCLUDE:
        raise invalid(f"include may hold {', '.join(_INCLUDE)}; not {name!r}.", "include")


def as_chat(body: ResponseBody, fields: dict[str, Any], items: Sequence[Item]) -> ChatBody:
    """The chat that answers `items`. `fields` is the body as it came. Raises ApiError."""
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    chat: dict[str, Any] = {name: value for name, value in fields.items() if name in _SHARED}
    chat["messages"] = instructions + messages_of(items)
    if body.max_output_tokens is not None:
        chat["max_completion_tokens"] = body.max_output_tokens
    if body.wants_logprobs:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.truncation == "auto":
        chat["truncate_prompt_tokens"] = -1
    if body.reasoning.effort is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.text.form.type != "text":
        chat["response_format"] = _response_format(body.text.form)
    return parse(ResponseChat, chat | _tool_fields(body.tools, body.tool_choice, body.parallel_tool_calls))


def as_chat_of_tools(echo: dict[str, Any]) -> ChatBody:
    """A chat with the tools of a response, by the fields that its answer repeats: how to find its calls."""
    tools = _tool_fields(echo["tools"], echo["tool_choice"], echo["parallel_tool_calls"])
    return parse(ChatBody, {"messages": [{"role": "user", "content": ""}]} | tools)


def _response_format(form: TextFormat) -> dict[str, Any]:
    if form.type == "json_object":
        return {"type": form.type}
    schema = {"name": form.name, "strict": form.strict, "schema": form.body}
    return {
        "type": form.type,
        form.type: {name: value for name, value in schema.items() if value is not None},
    }


def _tool_fields(
    tools: Sequence[dict[str, Any]], choice: str | dict[str, Any], several: bool
) -> dict[str, Any]:
    if not tools:
        return {} if choice in ("auto", "none") else {"tool_choice": _tool_choice(choice)}
    return {
        "tools": [_tool(tool, f"tools.{i}") for i, tool in enumerate(tools)],
        "tool_choice": _tool_choice(choice),
        "parallel_tool_calls": several,
    }


def _tool(tool: dict[str, Any], param: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise invalid(
            f"{param} has the type {tool.get('type')!r}; only function is supported.", f"{param}.type"
        )
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(choice, str):
        return choice
    return {"type": "function", "function": {"name": choice.get("name")}}


_NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "prompt": "input",
}


@contextmanager
def in_terms_of_a_response() -> Iterator[None]:
    """What is wrong with the chat within is told by the names that the client used."""
    try:
        yield
    except ApiError as error:
        name, _, rest = (error.param or "").partition(".")
        if name == "tools":  # whose functions stand in no field of their own
            error.message = error.message.replace(".function", "", 1)
            error.param = (error.param or "").replace(".function", "", 1)
        if name not in _NAMES:
            raise
        error.param = f"{_NAMES[name]}.{rest}" if rest else _NAMES[name]
        error.message = error.message.replace(name, _NAMES[name], 1)
        raise
