"""A conversation, how the model's template makes it a prompt, and the tools that the model may call in it."""

from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field, model_validator

from app.fields.called import may_call, must_call
from app.fields.message import Message
from app.fields.sampling_fields import SamplingFields
from app.fields.structure import Wanted
from app.gateway.errors import invalid
from app.tools.tool import NamedTool, Tool, ToolChoice
from app.tools.tool_format import ToolFormat, tool_format
from relay.chat_template import ChatTemplate
from relay.grammar import Grammars
from relay.model_file import ModelError
from relay.sampling import SamplingParams
from relay.tokenizer import Tokenizer

MAX_TOOLS = 128
# What the template gets from elsewhere.
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}


class Conversation(SamplingFields):
    """`chat_template` is Jinja of the client's own, if CLIENT_TEMPLATES allows it. `chat_template_kwargs`,
    `documents` and `reasoning_effort` are variables of the template, which may or may not use them."""

    strict_unless_said: ClassVar[bool] = False  # of a function

    messages: list[Message] = Field(min_length=1)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = Field(None, min_length=1, max_length=65_536)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    documents: list[dict[str, Any]] = Field(default_factory=list)
    reasoning_effort: str | None = None
    tools: list[Tool] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _one_continuation(self) -> "Conversation":
        if self.continue_final_message and self.add_generation_prompt:
            needed = "continue_final_message needs add_generation_prompt: false."
            raise invalid(needed, "continue_final_message")
        if reserved := _RESERVED.intersection(self.chat_template_kwargs):
            own = f"chat_template_kwargs must not hold {sorted(reserved)[0]}, which has its own field."
            raise invalid(own, "chat_template_kwargs")
        return self

    @model_validator(mode="after")
    def _tools_to_choose_from(self) -> "Conversation":
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise invalid("tools holds two functions of one name.", "tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise invalid(f"tools holds no {self.tool_choice.function.name!r}.", "tool_choice")
        if self.tool_choice == "required" and not self.tools:
            raise invalid("tool_choice is required, and there are no tools.", "tool_choice")
        return self

    @property
    def template_variables(self) -> dict[str, Any]:
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        documents = {"documents": self.documents} if self.documents else {}
        return effort | documents | self.chat_template_kwargs

    def template(self, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The model's, or the client's own. Raises ApiError if that does not compile."""
        if self.chat_template is None:
            return tokenizer.chat_template
        try:
            return tokenizer.compile_template(self.chat_template)
        except ModelError as error:
            raise invalid(f"chat_template: {error}.", "chat_template") from error

    # ---- tools

    @property
    def callable_tools(self) -> list[Tool]:
        """Those that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools

    def calls_format(self, tokenizer: Tokenizer) -> ToolFormat | None:
        """How calls will be written; None: there are no tools to call. Raises ApiError."""
        template = self.template(tokenizer)
        if not self.callable_tools or template is None:
            return None
        form = tool_format(template)
        if form is None:
            told = "how the model of this chat template writes calls is not known here"
            raise invalid(f"tools are not supported: {told}.", "tools", code="unsupported_parameter")
        return form

    def structures(self, tokenizer: Tokenizer) -> list[Wanted]:
        others = super().structures(tokenizer)
        form = self.calls_format(tokenizer)
        if form is None:
            return others
        several = self.parallel_tool_calls and not isinstance(self.tool_choice, NamedTool)
        if self.tool_choice == "auto":
            return may_call(form, self.tools, several, tokenizer, others, self.strict_unless_said)
        return [must_call(form, self._forced, several, tokenizer), *others]

    def params(self, max_tokens: int, seed: int, tokenizer: Tokenizer, grammars: Grammars) -> SamplingParams:
        params = super().params(max_tokens, seed, tokenizer, grammars)
        form = self.calls_format(tokenizer)
        if form is None or not any(tokenizer.is_special(mark) for mark in form.marks):
            return params
        return replace(params, skip_special_tokens=False)

    @property
    def _forced(self) -> list[Tool]:
        """One of these must be called."""
        if not isinstance(self.tool_choice, NamedTool):
            return self.tools
        name = self.tool_choice.function.name
        return [tool for tool in self.tools if tool.function.name == name]
