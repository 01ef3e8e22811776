"""What a model with tools may answer: calls where it must call, calls of strict functions where it may."""

from collections.abc import Callable, Sequence
from functools import partial

from app.fields.structure import Wanted
from app.tools.call_grammar import forced_calls, json_or_calls, text_or_calls
from app.tools.tool import Function, Tool
from app.tools.tool_format import ToolFormat
from relay.tokenizer import Tokenizer

FIELD = "tools"


def must_call(form: ToolFormat, tools: Sequence[Tool], several: bool, tokenizer: Tokenizer) -> Wanted:
    """A call of one of them, or `several`."""

    def make(functions: Sequence[Function]) -> str:
        return forced_calls(form, functions, several, tokenizer)

    functions = [tool.function for tool in tools]
    return Wanted(FIELD, lambda: make(functions), parts=_alone(functions, make))


def may_call(
    form: ToolFormat,
    tools: Sequence[Tool],
    several: bool,
    tokenizer: Tokenizer,
    others: list[Wanted],
    strict_unless_said: bool,
) -> list[Wanted]:
    """What is wanted where the model may call, and else answers as `others` say: these alone if no function
    is strict. Functions that are strict unsaid are so only if that can be followed."""
    functions = [_said(tool.function, strict_unless_said) for tool in tools]
    if not any(each.strict for each in functions):
        return others
    unsaid = may_call(form, tools, several, tokenizer, others, False) if strict_unless_said else None

    def text(functions: Sequence[Function]) -> str:
        return text_or_calls(form, functions, several, tokenizer)

    parts = [*others, *_alone(functions, text)]
    if not others:
        return [Wanted(FIELD, lambda: text(functions), parts=parts, instead=unsaid)]
    schema = others[0].schema
    if schema is None or len(others) > 1:
        return [Wanted(FIELD, lambda: text(functions)), *others] if unsaid is None else unsaid

    def json() -> str:
        return json_or_calls(form, functions, several, tokenizer, schema())

    return [Wanted(FIELD, json, parts=parts, instead=unsaid)]


def _said(function: Function, strict_unless_said: bool) -> Function:
    if function.strict is not None:
        return function
    return function.model_copy(update={"strict": strict_unless_said})


def _alone(functions: Sequence[Function], make: Callable[[Sequence[Function]], str]) -> list[Wanted]:
    """The same with each function alone, which tells what is wrong with its schema."""
    return [
        Wanted(f"{FIELD}.{i}.function.parameters", partial(make, [each])) for i, each in enumerate(functions)
    ]
