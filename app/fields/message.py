"""One message of a conversation."""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from app.gateway.strict import Strict


class TextPart(Strict):
    type: Literal["text"]
    text: str


def _check_content(value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a text or a list of text parts")
    return "".join(map(_text_of, value))


def _text_of(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(kind) if kind in ("text", "refusal") else None
    if not isinstance(text, str):
        raise ValueError('may hold parts of the form {"type": "text", "text": ...} only')
    return text


def _check_arguments(value: Any) -> Any:
    """Templates write the arguments of earlier calls as JSON, so they get what the text says."""
    if isinstance(value, dict):
        return value
    try:
        found = json.loads(value or "{}")
    except (TypeError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError("must be the JSON text of an object")
    return found


class CalledFunction(Strict):
    name: str
    arguments: Annotated[
        dict[str, Any], BeforeValidator(_check_arguments, json_schema_input_type=str | dict[str, Any])
    ] = Field(default_factory=dict)


class ToolCall(Strict):
    """A call that the assistant made earlier."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    """`reasoning_content`, or `reasoning`, is a variable of the template, as `name` is."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    text: Annotated[str, BeforeValidator(_check_content, json_schema_input_type=str | list[TextPart])] = (
        Field(alias="content")
    )
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list)
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _content_or_calls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("function_call") or data.get("role") == "function":
            raise ValueError("functions of the older form are not supported: send them as tools")
        if data.get("audio"):
            raise ValueError("audio is not supported: send its transcript as content")
        if data.get("tool_calls") and data.get("role") != "assistant":
            raise ValueError("only an assistant makes tool_calls")
        if data.get("role") == "tool" and "tool_call_id" not in data:
            raise ValueError("a tool's message names the call that it answers in tool_call_id")
        if refusal := data.get("refusal"):
            if data.get("role") != "assistant" or data.get("content"):
                raise ValueError("a refusal is what an assistant said in the place of content")
            return data | {"content": refusal}
        return {"content": ""} | data if data.get("tool_calls") else data
