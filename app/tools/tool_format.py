"""How families of models write the calls of tools, told apart by what their chat templates hold."""

import re
from typing import NamedTuple

from relay.chat_template import ChatTemplate


class ToolFormat(NamedTuple):
    """Calls are JSON objects with a name and `arguments_key`, behind `start` and up to `end`.

    With `bare` an answer that begins like a JSON object is a call, too; with `leads` only an answer that
    begins with `start` holds calls. `opening`, `separator` and `closing` are what the model writes around
    several calls when it has to call. `python`: calls are those of a Python list.
    """

    name: str
    start: str
    separator: str
    opening: str = ""
    closing: str = ""
    end: str = ""
    arguments_key: str = "arguments"
    bare: bool = False
    leads: bool = False
    python: bool = False
    named: str = ""
    id_length: int = 24  # of a call's id

    @property
    def marks(self) -> list[str]:
        """What has to be seen to find a call."""
        return [mark for mark in (self.start, self.end, self.named) if mark]


HERMES = ToolFormat(
    "hermes",
    start="<tool_call>",
    separator="\n</tool_call>\n<tool_call>\n",
    opening="<tool_call>\n",
    closing="\n</tool_call>",
    end="</tool_call>",
)
LLAMA3 = ToolFormat("llama3", start="<|python_tag|>", separator="; ", arguments_key="parameters", bare=True)
MISTRAL = ToolFormat(
    "mistral", start="[TOOL_CALLS]", separator=", ", opening="[TOOL_CALLS][", closing="]", id_length=9
)
MISTRAL_NAMED = ToolFormat(
    "mistral-named",
    start="[TOOL_CALLS]",
    separator="[TOOL_CALLS]",
    opening="[TOOL_CALLS]",
    named="[ARGS]",
    id_length=9,
)
ARRAY = ToolFormat("array", start="[", separator=", ", opening="[", closing="]", leads=True)
PYTHON = ToolFormat("python", start="[", separator=", ", opening="[", closing="]", leads=True, python=True)
_PYTHON_IN_TEMPLATE = re.compile(r"\[\w+\(\w+=")
_ARRAY_IN_TEMPLATE = re.compile(r'\[\{\\?"name\\?": [^{}]*"arguments\\?":')


def tool_format(template: ChatTemplate) -> ToolFormat | None:
    """What a model with this template writes; HERMES for one that knows no tools, which is then told how.

    None: it knows them in a way that is not known here.
    """
    source = template.source
    if not template.knows_tools:
        return HERMES
    if "<function=" in source:
        return None
    if "[TOOL_CALLS]" in source:
        return MISTRAL_NAMED if MISTRAL_NAMED.named in source else MISTRAL
    if "<tool_call>" in source:
        return HERMES
    if _PYTHON_IN_TEMPLATE.search(source):
        return PYTHON
    if _ARRAY_IN_TEMPLATE.search(source):
        return ARRAY
    # Templates of others show what a tool is with its "parameters" as well.
    llama = "<|start_header_id|>" in source or "<|header_start|>" in source
    return LLAMA3 if "<|python_tag|>" in source or (llama and '"parameters"' in source) else None
