"""From what a client calls a prompt to token ids."""

from typing import Any

from app.fields.conversation import Conversation
from app.fields.message import Message
from app.fields.sampling_fields import SamplingFields
from app.fields.schema import CompletionBody, Prompt
from app.gateway.errors import invalid
from app.gateway.service import Service
from app.tools.generic_tools import with_tools
from relay.chat_template import ChatTemplate, ChatTemplateError
from relay.tokenizer import Tokenizer

MAX_PROMPT_LOGPROBS = 1 << 17  # values that Redis keeps with one request
_CUT = "\N{SYMBOL FOR END OF TEXT}cut here"  # marks where a message ends that is to be continued


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt, add_special_tokens: bool = True) -> tuple[int, ...]:
    """Token ids of a text, or the ids given. Raises ApiError for an empty prompt or an unknown token id."""
    ids = tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
    if not prompt or not ids:
        raise invalid("The prompt must be non-empty.", "prompt")
    if wrong := next((i for i in ids if not 0 <= i < tokenizer.vocab_size), None):
        raise invalid(f"Token id {wrong} is outside the vocabulary of {tokenizer.vocab_size}.", "prompt")
    return tuple(ids)


def prompt_of_text(service: Service, body: SamplingFields, prompt: Prompt) -> tuple[int, ...]:
    """Token ids of one prompt of `body`. Raises ApiError."""
    ids = encode_prompt(service.tokenizer, prompt, body.add_special_tokens is not False)
    return _fit(ids, body, service.context_tokens)


def echoed_text(tokenizer: Tokenizer, body: CompletionBody, prompt: Prompt, ids: tuple[int, ...]) -> str:
    """The text of a prompt as the answer repeats it: as it was sent, if that was a text and is all there."""
    if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
        return prompt
    return tokenizer.decode(ids, skip_special_tokens=body.skip_special_tokens)


def prompt_of_conversation(service: Service, body: Conversation) -> tuple[int, ...]:
    """Token ids of the messages of `body`, in its template. Raises ApiError."""
    if body.chat_template is not None and not service.settings.client_templates:
        raise invalid("chat_template is not allowed here: CLIENT_TEMPLATES is off.", "chat_template")
    template = body.template(service.tokenizer)
    messages, tools = [plain(message) for message in body.messages], _shown_tools(body)
    variables = body.template_variables
    if template is not None and template.knows_tools:
        variables |= {"tools": tools} if tools else {}
    else:
        messages = with_tools(messages, tools)
    text = render(
        service.tokenizer,
        messages,
        template=template,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        variables=variables,
    )
    ids = _encode(service.tokenizer, text, body.add_special_tokens is True)
    return _fit(ids, body, service.context_tokens)


def render(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    *,
    template: ChatTemplate | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: dict[str, Any] | None = None,
) -> str:
    """The prompt as a text; with `continue_final_message` it ends where the last message does.

    `template`: instead of the model's own. Raises ApiError.
    """
    if continue_final_message:
        last = messages[-1]
        messages = [*messages[:-1], last | {"content": f"{last['content']}{_CUT}"}]
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt, template, variables)
    except ChatTemplateError as error:
        raise invalid(f"The messages cannot be made a prompt: {error}", "messages") from error
    if not continue_final_message:
        return text
    if _CUT not in text:
        raise invalid("The chat template does not show the last message.", "continue_final_message")
    return text[: text.rindex(_CUT)]


def _fit(ids: tuple[int, ...], body: SamplingFields, context_tokens: int) -> tuple[int, ...]:
    ids = truncated(ids, body, context_tokens)
    wanted = body.prompt_logprobs_wanted
    if wanted is not None and (values := len(ids) * (wanted + 1)) > MAX_PROMPT_LOGPROBS:
        allowed = f"at most {MAX_PROMPT_LOGPROBS} are kept"
        raise invalid(f"The prompt has {values} log probabilities, {allowed}.", "prompt_logprobs")
    return ids


def truncated(ids: tuple[int, ...], body: SamplingFields, context_tokens: int) -> tuple[int, ...]:
    """The last `truncate_prompt_tokens` of a prompt; -1: what the context leaves beside the output."""
    most = body.truncate_prompt_tokens
    if most is None:
        return ids
    if most == 0:
        raise invalid("truncate_prompt_tokens must be -1, or 1 and more.", "truncate_prompt_tokens")
    if most == -1:
        most = max(1, context_tokens - (body.output_tokens or 1))
    return ids[-most:]


def plain(message: Message) -> dict[str, Any]:
    """A message as templates know it."""
    role = "system" if message.role == "developer" else message.role
    more: dict[str, Any] = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content or message.reasoning,
    }
    if message.tool_calls:
        more["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    return {"role": role, "content": message.text} | {k: v for k, v in more.items() if v is not None}


def _shown_tools(body: Conversation) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_none=True) for tool in body.callable_tools]


def _encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> tuple[int, ...]:
    # A template spells its own BOS.
    ids = tokenizer.encode(text, add_special_tokens)
    if not ids:
        raise invalid("The messages make an empty prompt.", "messages")
    return tuple(ids)
