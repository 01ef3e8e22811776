"""From what a client calls a prompt to token ids."""

from collections.abc import Sequence
from typing import Any

from app.errors import invalid
from app.schema import Message, Prompt
from relay.chat_template import ChatTemplateError
from relay.tokenizer import Tokenizer


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt) -> tuple[int, ...]:
    """Token ids of a text, or the ids given. Raises ApiError for an empty prompt or an unknown token id."""
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    if not prompt or not ids:
        raise invalid("The prompt must be non-empty.", "prompt")
    if wrong := next((i for i in ids if not 0 <= i < tokenizer.vocab_size), None):
        raise invalid(f"Token id {wrong} is outside the vocabulary of {tokenizer.vocab_size}.", "prompt")
    return tuple(ids)


def encode_messages(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[int, ...]:
    """Token ids of a conversation, up to the assistant's turn. Raises ApiError if the template refuses."""
    try:
        text = tokenizer.apply_chat_template([_plain(message) for message in messages])
    except ChatTemplateError as error:
        raise invalid(f"The messages cannot be made a prompt: {error}", "messages") from error
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise invalid("The messages make an empty prompt.", "messages")
    return tuple(ids)


def _plain(message: Message) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    named = {"name": message.name} if message.name is not None else {}
    return {"role": role, "content": message.text, **named}
