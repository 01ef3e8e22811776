"""A conversation, and how the model's template makes it a prompt."""

from typing import Any

from pydantic import Field, model_validator

from app.errors import invalid
from app.message import Message
from app.sampling_fields import SamplingFields

# What the template gets from elsewhere.
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}


class Conversation(SamplingFields):
    """`chat_template` is Jinja of the client's own, if CLIENT_TEMPLATES allows it. `chat_template_kwargs`,
    `documents` and `reasoning_effort` are variables of the template, which may or may not use them."""

    messages: list[Message] = Field(min_length=1)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = Field(None, min_length=1, max_length=65_536)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    documents: list[dict[str, Any]] = Field(default_factory=list)
    reasoning_effort: str | None = None

    @model_validator(mode="after")
    def _one_continuation(self) -> "Conversation":
        if self.continue_final_message and self.add_generation_prompt:
            needed = "continue_final_message needs add_generation_prompt: false."
            raise invalid(needed, "continue_final_message")
        if reserved := _RESERVED.intersection(self.chat_template_kwargs):
            own = f"chat_template_kwargs must not hold {sorted(reserved)[0]}, which has its own field."
            raise invalid(own, "chat_template_kwargs")
        return self

    @property
    def template_variables(self) -> dict[str, Any]:
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        documents = {"documents": self.documents} if self.documents else {}
        return effort | documents | self.chat_template_kwargs
