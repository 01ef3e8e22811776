"""The items of an answer, made token by token: its text, and the calls of tools in it."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from app.tools.tool_reply import ToolReply
from relay.request import State, Token
from relay.tokens import End

Object = dict[str, Any]


class Told(NamedTuple):
    """What is told of a step. Nothing in `fields` changes any more."""

    name: str
    fields: Object


class ResponseOutput:
    """`items` is what is there so far. Fed the same tokens it makes the same items and tells the same."""

    def __init__(
        self, hex_id: str, tools: ToolReply | None, logprobs: Callable[[Sequence[Token]], list[Object]]
    ) -> None:
        """`hex_id` names the response; `tools` where the answer may call some."""
        self.items: list[Object] = []
        self._hex_id = hex_id
        self._tools = tools
        self._logprobs = logprobs
        self._open = False  # the last item is in progress
        self._call = -1  # which call that is
        self._untold: list[Token] = []  # their text is not told yet: it may begin a call

    def token(self, token: Token) -> list[Told]:
        self._untold.append(token)
        return self._take(self._tools.delta(token.text) if self._tools else {"content": token.text})

    def end(self, end: End) -> list[Told]:
        """The last item is incomplete unless the answer ended by itself."""
        delta = {"content": end.text} if end.text else {}
        if self._tools:
            delta = self._tools.last_delta(end.text)
        told = self._take(delta)
        if not self.items and end.state is State.FINISHED:
            told += self._open_message()
        whole = end.state is State.FINISHED and end.finish_reason != "length"
        return told + self._close("completed" if whole else "incomplete")

    # ---- steps

    def _take(self, delta: Object) -> list[Told]:
        """`delta` as in a chat."""
        told = self._text(delta["content"]) if "content" in delta else []
        for call in delta.get("tool_calls", ()):
            told += self._arguments(call)
        return told

    def _text(self, text: str) -> list[Told]:
        told = [] if self._open and self._call < 0 else [*self._close("completed"), *self._open_message()]
        logprobs = self._logprobs(self._untold)
        self._untold.clear()
        (part,) = self.items[-1]["content"]
        part["text"] += text
        part["logprobs"] += logprobs
        return [*told, self._told("output_text.delta", content_index=0, delta=text, logprobs=logprobs)]

    def _arguments(self, call: Object) -> list[Told]:
        self._untold.clear()
        told: list[Told] = []
        if call["index"] != self._call:
            told = [*self._close("completed"), *self._open_call(call)]
        delta = call["function"]["arguments"]
        if not delta:
            return told
        self.items[-1]["arguments"] += delta
        return [*told, self._told("function_call_arguments.delta", delta=delta)]

    def _open_message(self) -> list[Told]:
        item_id = self._item_id("msg")
        self._begin({"id": item_id, "type": "message", "role": "assistant", "content": []}, call=-1)
        added = self._told_item("added")
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.items[-1]["content"].append(part)
        return [added, self._told("content_part.added", content_index=0, part=part)]

    def _open_call(self, call: Object) -> list[Told]:
        item = {"id": self._item_id("fc"), "type": "function_call", "call_id": call["id"]}
        self._begin(item | {"name": call["function"]["name"], "arguments": ""}, call=call["index"])
        return [self._told_item("added")]

    def _begin(self, item: Object, call: int) -> None:
        self.items.append(item | {"status": "in_progress"})
        self._open, self._call = True, call

    def _close(self, status: str) -> list[Told]:
        if not self._open:
            return []
        self._open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            arguments = {"name": item["name"], "arguments": item["arguments"]}
            return [self._told("function_call_arguments.done", **arguments), self._told_item("done")]
        (part,) = item["content"]
        words = {"text": part["text"], "logprobs": part["logprobs"]}
        return [
            self._told("output_text.done", content_index=0, **words),
            self._told("content_part.done", content_index=0, part=part),
            self._told_item("done"),
        ]

    # ---- telling

    def _told(self, name: str, /, **fields: Any) -> Told:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return Told(name, place | copy.deepcopy(fields))

    def _told_item(self, what: str) -> Told:
        fields = {"output_index": len(self.items) - 1, "item": copy.deepcopy(self.items[-1])}
        return Told(f"output_item.{what}", fields)

    def _item_id(self, prefix: str) -> str:
        number = f"_{len(self.items)}" if self.items else ""
        return f"{prefix}_{self._hex_id}{number}"
