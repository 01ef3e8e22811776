"""One message of a conversation."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from app.strict import Strict


def _check_content(value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a text or a list of text parts")
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError('may hold parts of the form {"type": "text", "text": ...} only')
    return "".join(part["text"] for part in value)


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    text: Annotated[str, BeforeValidator(_check_content)] = Field(alias="content")
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_tools(cls, data: Any) -> Any:
        if isinstance(data, dict) and (data.get("tool_calls") or data.get("function_call")):
            raise ValueError("tool calls are not supported yet")
        return data
