"""Functions that a client lets the model call."""

from typing import Any, Literal

from pydantic import Field

from app.gateway.strict import Strict


class Function(Strict):
    """The arguments of a `strict` one follow `parameters`, as those of any do where a call is demanded."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool
