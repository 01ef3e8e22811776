"""From bodies to prompts: truncation, templates and their variables, messages to go on with, tools."""

import json
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.fields.prompt import MAX_PROMPT_LOGPROBS, echoed_text, prompt_of_conversation, prompt_of_text
from app.fields.schema import ChatBody, CompletionBody, parse
from app.gateway.errors import ApiError
from app.gateway.service import Service
from relay.model_file import default_model_path
from relay.tokenizer import Tokenizer

CONTEXT_TOKENS = 8192
ASK = [{"role": "user", "content": "Hi"}]


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    return Tokenizer.load(default_model_path())


def service(client_templates: bool = False) -> Service:
    """What prompts are made with."""
    settings = SimpleNamespace(client_templates=client_templates)
    made = SimpleNamespace(tokenizer=tokenizer(), context_tokens=CONTEXT_TOKENS, settings=settings)
    return cast(Service, made)


def text_ids(prompt: Any, **fields: Any) -> tuple[int, ...]:
    body = parse(CompletionBody, {"prompt": prompt, **fields})
    return prompt_of_text(service(), body, body.prompts[0])


def echoed(prompt: Any, ids: tuple[int, ...], **fields: Any) -> str:
    body = parse(CompletionBody, {"prompt": prompt, "echo": True, **fields})
    return echoed_text(tokenizer(), body, body.prompts[0], ids)


def chat(client_templates: bool = False, **fields: Any) -> str:
    """The prompt as a text."""
    body = parse(ChatBody, {"messages": ASK, **fields})
    ids = prompt_of_conversation(service(client_templates), body)
    return tokenizer().decode(ids, skip_special_tokens=False)


def refused(param: str, call: Any) -> None:
    with pytest.raises(ApiError) as caught:
        call()
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("keep", [1, 3, 100])
def test_a_truncated_prompt_keeps_its_end(keep: int) -> None:
    ids = tuple(range(10, 17))
    assert text_ids(list(ids), truncate_prompt_tokens=keep) == ids[-keep:]


def test_minus_one_leaves_room_for_the_output() -> None:
    ids = [5] * 10_000
    assert len(text_ids(ids, truncate_prompt_tokens=-1, max_tokens=100)) == CONTEXT_TOKENS - 100
    assert len(text_ids(ids, truncate_prompt_tokens=-1)) == CONTEXT_TOKENS - 16
    refused("truncate_prompt_tokens", lambda: text_ids(ids, truncate_prompt_tokens=0))


def test_log_probabilities_of_a_prompt_are_bounded() -> None:
    most = MAX_PROMPT_LOGPROBS // 21
    assert len(text_ids([5] * most, prompt_logprobs=20)) == most
    refused("prompt_logprobs", lambda: text_ids([5] * (most + 1), prompt_logprobs=20))
    refused("prompt_logprobs", lambda: text_ids([5] * (most + 1), echo=True, logprobs=20))
    assert len(text_ids([5] * (most + 1), echo=True)) == most + 1


def test_an_echo_is_what_was_sent_where_all_of_it_is_there() -> None:
    assert echoed("Hello  world", (1, 2)) == "Hello  world"
    ids = tuple(tokenizer().encode("Hello  world"))
    for prompt in (list(ids), "xx Hello  world"):
        assert echoed(prompt, ids, truncate_prompt_tokens=len(ids)) == "Hello  world"


# ---- templates


def test_a_generation_prompt_unless_told_otherwise() -> None:
    assert chat().endswith("<|im_start|>assistant\n")
    assert chat(add_generation_prompt=False).endswith("Hi<|im_end|>\n")


def test_the_last_message_is_gone_on_with() -> None:
    begun = [*ASK, {"role": "assistant", "content": "It is "}]
    text = chat(messages=begun, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nIt is ")
    refused("continue_final_message", lambda: chat(messages=begun, continue_final_message=True))


def test_the_echo_of_a_chat_is_the_message_gone_on_with() -> None:
    begun = [*ASK, {"role": "assistant", "content": "It is "}]
    assert parse(ChatBody, {"messages": begun, "echo": True}).echoed_text == "It is "
    assert parse(ChatBody, {"messages": begun}).echoed_text == ""
    assert parse(ChatBody, {"messages": ASK, "echo": True}).echoed_text == ""


def test_a_template_of_the_clients_own() -> None:
    source = (
        "{{ bos_token }}{{ messages[0].content }} {{ mood }} {{ reasoning_effort }} "
        "{% for d in documents %}{{ d.text }}{% endfor %}"
    )
    fields: dict[str, Any] = {
        "chat_template": source,
        "chat_template_kwargs": {"mood": "merry"},
        "reasoning_effort": "low",
        "documents": [{"text": "a"}, {"text": "b"}],
    }
    assert chat(client_templates=True, **fields) == "<|im_start|>Hi merry low ab"
    refused("chat_template", lambda: chat(**fields))
    refused("chat_template", lambda: chat(client_templates=True, chat_template="{% if %}"))
    refused("messages", lambda: chat(client_templates=True, chat_template="{{ raise_exception('no') }}"))
    refused("continue_final_message", lambda: chat(True, **_hidden()))


def _hidden() -> dict[str, Any]:
    return {
        "chat_template": "always the same",
        "add_generation_prompt": False,
        "continue_final_message": True,
    }


def test_tools_are_told_to_templates_that_know_them() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    knows = "<tool_call>{{ tools | tojson if tools else 'none' }}"
    assert chat(True, chat_template=knows, tools=[tool]) == f"<tool_call>[{_dumped(tool)}]"
    assert chat(True, chat_template=knows, tools=[tool], tool_choice="none") == "<tool_call>none"
    assert _dumped(tool["function"]) in chat(tools=[tool])
    assert _dumped(tool["function"]) not in chat(tools=[tool], tool_choice="none")


def _dumped(value: Any) -> str:
    return json.dumps(value)
