"""The items of a conversation, as /v1/responses has them, and the messages that a template takes."""

import secrets
from collections.abc import Sequence
from typing import Any, NoReturn

from app.gateway.errors import invalid

Item = dict[str, Any]
_TEXTS = ("input_text", "output_text", "text")
_ROLES = ("system", "developer", "user", "assistant")


def items_of(given: str | list[Any]) -> list[Item]:
    """The items of the field `input`, each with an id. Raises ApiError that names the wrong one."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not given:
        raise invalid("input must not be empty.", "input")
    return [_item(item, f"input.{i}") for i, item in enumerate(given)]


def messages_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """In the form of /v1/chat/completions. Calls in a row are those of one turn."""
    messages: list[dict[str, Any]] = []
    for item in items:
        if item["type"] == "message":
            content = "".join(part.get("text", "") for part in item["content"])
            messages.append({"role": item["role"], "content": content})
        elif item["type"] == "function_call_output":
            content = item["output"]
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        else:
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    return messages


def _item(item: Any, param: str) -> Item:
    if not isinstance(item, dict):
        raise invalid(f"{param} must be an object.", param)
    kind = item.get("type", "message")
    if kind == "message":
        return _message(item, param)
    if kind == "function_call":
        texts = {name: _text(item, name, param) for name in ("call_id", "name", "arguments")}
        return {"id": _id(item, "fc"), "type": kind, "status": "completed", **texts}
    if kind == "function_call_output":
        output = item.get("output")
        shown = output if isinstance(output, str) else "".join(_texts(output, f"{param}.output"))
        call_id = _text(item, "call_id", param)
        return {
            "id": _id(item, "fco"),
            "type": kind,
            "status": "completed",
            "call_id": call_id,
            "output": shown,
        }
    raise invalid(f"{param} has the type {kind!r}, which is not supported.", f"{param}.type")


def _message(item: dict[str, Any], param: str) -> Item:
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise invalid(f"{param}.role must be one of {', '.join(_ROLES)}, not {role!r}.", f"{param}.role")
    texts = [content] if isinstance(content, str) else _texts(content, f"{param}.content")
    kind = "output_text" if role == "assistant" else "input_text"
    more: Item = {"annotations": []} if role == "assistant" else {}
    parts = [{"type": kind, "text": text, **more} for text in texts]
    return {"id": _id(item, "msg"), "type": "message", "status": "completed", "role": role, "content": parts}


def _texts(content: Any, param: str) -> list[str]:
    if not isinstance(content, list):
        raise invalid(f"{param} must be a text or a list of parts.", param)
    return [_part(part, f"{param}.{i}") for i, part in enumerate(content)]


def _part(part: Any, param: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "refusal":
        return _text(part, "refusal", param)
    if kind not in _TEXTS:
        raise invalid(f"{param} has the type {kind!r}; texts only are supported.", f"{param}.type")
    return _text(part, "text", param)


def _text(fields: dict[str, Any], name: str, param: str) -> str:
    found = fields.get(name)
    if not isinstance(found, str):
        _refuse(f"{param}.{name}")
    return found


def _refuse(param: str) -> NoReturn:
    raise invalid(f"{param} must be a text.", param)


def _id(item: dict[str, Any], prefix: str) -> str:
    found = item.get("id")
    return found if isinstance(found, str) and found else f"{prefix}_{secrets.token_hex(12)}"
