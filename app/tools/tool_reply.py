"""The calls of tools in an answer, as OpenAI's chat shows them: whole, or piece by piece."""

from collections.abc import Collection
from hashlib import blake2b
from typing import Any

from app.tools.tool_format import ToolFormat
from app.tools.tool_parser import Piece, ToolParser


class ToolReply:
    """Of one answer, named by `answer_id`: the same answer has the same ids of calls, whoever shows it."""

    def __init__(self, form: ToolFormat, names: Collection[str], several: bool, answer_id: str) -> None:
        self._form = form
        self._names = names
        self._several = several
        self._answer_id = answer_id
        self._parser = self._new_parser()

    @property
    def called(self) -> bool:
        """Whether a call has been shown."""
        return self._parser.calls > 0

    def delta(self, text: str) -> dict[str, Any]:
        return self._delta(self._parser.push(text))

    def last_delta(self, text: str) -> dict[str, Any]:
        return self._delta(self._parser.push(text) + self._parser.flush())

    def message(self, text: str) -> dict[str, Any]:
        """Content and calls of a whole answer. Where a call is broken or cut off, all of it is content."""
        parser = self._new_parser()
        pieces = parser.push(text) + parser.flush()
        calls = [
            {"id": self._call_id(piece.call), "type": "function", "function": _function(pieces, piece)}
            for piece in pieces
            if piece.name is not None
        ]
        if parser.broken or not calls:
            return {"content": text}
        self._parser = parser
        content = "".join(piece.text for piece in pieces)
        return {"content": content or None, "tool_calls": calls}

    def _new_parser(self) -> ToolParser:
        return ToolParser(self._form, self._names, self._several)

    def _delta(self, pieces: list[Piece]) -> dict[str, Any]:
        content = "".join(piece.text for piece in pieces)
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            if piece.call < 0:
                continue
            call = calls.setdefault(piece.call, {"index": piece.call, "function": {"arguments": ""}})
            if piece.name is not None:
                call |= {"id": self._call_id(piece.call), "type": "function"}
                call["function"] = {"name": piece.name, "arguments": ""}
            call["function"]["arguments"] += piece.arguments
        shown: dict[str, Any] = {"content": content} if content else {}
        return shown | {"tool_calls": list(calls.values())} if calls else shown

    def _call_id(self, index: int) -> str:
        digest = blake2b(f"{self._answer_id}:{index}".encode()).hexdigest()[: self._form.id_length]
        return digest if self._form.id_length < 24 else f"call_{digest}"


def _function(pieces: list[Piece], named: Piece) -> dict[str, Any]:
    arguments = "".join(piece.arguments for piece in pieces if piece.call == named.call)
    return {"name": named.name, "arguments": arguments}
