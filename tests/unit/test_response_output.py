"""The items of an answer: the same from the same tokens, however the text is cut into them."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from app.response.response_output import ResponseOutput, Told
from app.tools.tool_format import HERMES
from app.tools.tool_reply import ToolReply
from relay.request import State, Token
from relay.tokens import End

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


def ended(reason: str | None = "stop", state: State = State.FINISHED, text: str = "") -> End:
    return End(state, text, reason, None, None, None)


def logprobs(tokens: Sequence[Token]) -> list[dict[str, Any]]:
    return [{"token": token.text} for token in tokens]


def tell(pieces: list[str], end: End, tools: bool = True) -> tuple[ResponseOutput, list[Told]]:
    reply = ToolReply(HERMES, {"weather", "time"}, True, "req-1") if tools else None
    output = ResponseOutput("abc", reply, logprobs)
    told = [each for i, text in enumerate(pieces) for each in output.token(Token(i, i, text))]
    return output, told + output.end(end)


def cut(text: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    places = sorted(rng.sample(range(1, len(text)), min(len(text) - 1, 9)))
    return [text[start:stop] for start, stop in zip([0, *places], [*places, len(text)])]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_told_adds_up_to_the_items(seed: int) -> None:
    output, told = tell(cut(f"I look.\n{CALL}\n{OTHER}", seed), ended())
    message, weather, time = output.items
    assert (message["content"][0]["text"], message["id"], message["status"]) == (
        "I look.",
        "msg_abc",
        "completed",
    )
    assert (weather["name"], weather["arguments"], weather["id"]) == (
        "weather",
        '{"city": "Rome"}',
        "fc_abc_1",
    )
    assert (time["name"], time["arguments"], time["status"]) == ("time", "{}", "completed")
    assert weather["call_id"] != time["call_id"]
    deltas: dict[int, str] = {}
    for name, fields in told:
        if name.endswith(".delta"):
            deltas[fields["output_index"]] = deltas.get(fields["output_index"], "") + fields["delta"]
    assert deltas == {0: "I look.", 1: weather["arguments"], 2: time["arguments"]}
    done = [fields["item"] for name, fields in told if name == "output_item.done"]
    assert done == output.items
    added = [fields["item"] for name, fields in told if name == "output_item.added"]
    assert [item["status"] for item in added] == ["in_progress"] * 3
    assert [item.get("arguments") for item in added] == [None, "", ""]


def test_logprobs_are_those_of_the_text_even_when_it_was_held_back() -> None:
    pieces = ["Less ", "<to", "ol", " than."]
    output, _ = tell(pieces, ended())
    (part,) = output.items[0]["content"]
    assert part["text"] == "Less <tool than."
    assert [each["token"] for each in part["logprobs"]] == pieces


def test_an_empty_answer_is_an_empty_message() -> None:
    output, told = tell([], ended())
    (item,) = output.items
    assert (item["content"][0]["text"], item["status"]) == ("", "completed")
    assert [name for name, _ in told] == [
        *("output_item.added", "content_part.added"),
        *("output_text.done", "content_part.done", "output_item.done"),
    ]
    assert tell([], ended(None, State.FAILED))[0].items == []


@pytest.mark.parametrize(
    "end",
    [ended("length"), ended(None, State.CANCELLED), ended(None, State.FAILED)],
    ids=lambda end: end.state,
)
def test_what_is_cut_off_is_incomplete(end: End) -> None:
    assert tell(["I lo"], end)[0].items[0]["status"] == "incomplete"
    *_, call = tell(cut(CALL, 1)[:-3], end)[0].items
    assert (call["type"], call["status"]) == ("function_call", "incomplete")


def test_what_was_held_back_until_the_end_is_text() -> None:
    output, told = tell(["One"], ended(text=" two"), tools=False)
    assert output.items[0]["content"][0]["text"] == "One two"
    assert [fields["delta"] for name, fields in told if name == "output_text.delta"] == ["One", " two"]
