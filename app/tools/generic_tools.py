"""How a model is told of tools, and shown calls and results, whose chat template knows none of them."""

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

_HOW = """You can call functions. Each line between the tags describes one in JSON:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as JSON between these tags:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""


def with_tools(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation in messages of plain text: tools are in the system's, results in a user's."""
    plain: list[dict[str, Any]] = []
    for is_result, group in groupby(messages, key=lambda message: bool(message["role"] == "tool")):
        if is_result:
            results = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
            plain.append({"role": "user", "content": "\n".join(results)})
        else:
            plain += [_without_calls(message) for message in group]
    return _told(plain, tools) if tools else plain


def _without_calls(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        f"<tool_call>\n{json.dumps(_call(call))}\n</tool_call>" for call in message.get("tool_calls", ())
    ]
    content = "\n".join([message["content"], *calls] if message["content"] else calls)
    return {name: value for name, value in message.items() if name != "tool_calls"} | {"content": content}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {"name": function["name"], "arguments": function["arguments"]}


def _told(messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    how = _HOW.format(tools="\n".join(json.dumps(tool["function"]) for tool in tools))
    if messages[0]["role"] == "system":
        first, *others = messages
        return [first | {"content": f"{first['content']}\n\n{how}"}, *others]
    return [{"role": "system", "content": how}, *messages]
