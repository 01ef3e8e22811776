"""Items of a conversation, and the messages they become."""

from typing import Any

import pytest

from app.gateway.errors import ApiError
from app.response.response_items import items_of, messages_of


def test_a_text_is_what_the_user_said() -> None:
    (item,) = items_of("Hello")
    assert (item["type"], item["role"], item["status"]) == ("message", "user", "completed")
    assert item["content"] == [{"type": "input_text", "text": "Hello"}]
    assert item["id"].startswith("msg_")
    assert messages_of([item]) == [{"role": "user", "content": "Hello"}]


def test_items_of_all_kinds_become_messages() -> None:
    given: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": text} for text in ("Weather", "?")]},
        {"role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
    ]
    items = items_of(given)
    assert items[2]["id"] == "msg_1"
    assert len({item["id"] for item in items}) == len(items)
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
        {"id": "c2", "type": "function", "function": {"name": "time", "arguments": "{}"}},
    ]
    assert messages_of(items) == [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "noon"},
    ]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([], "input"),
        ([7], "input.0"),
        ([{"type": "item_reference", "id": "x"}], "input.0.type"),
        ([{"role": "owner", "content": "x"}], "input.0.role"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], "input.1.content"),
        (
            [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
            "input.0.content.0.type",
        ),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input.0.content.0.text"),
        ([{"type": "function_call", "name": "f", "arguments": "{}"}], "input.0.call_id"),
        ([{"type": "function_call_output", "call_id": "c"}], "input.0.output"),
    ],
)
def test_what_is_refused_is_named(given: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        items_of(given)
    assert (caught.value.status, caught.value.param) == (400, param)
