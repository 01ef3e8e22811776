"""Grammars of answers that call tools: because they have to, or where the model likes.

They hold to how `tool_parser.py` reads an answer: nothing that it takes for a call escapes them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from app.tools.call_rules import SPACE, arguments, calls, escaped, loose, written
from app.tools.tool import Function
from app.tools.tool_format import ToolFormat
from relay.grammar import GrammarError, json_rule, lark_grammar
from relay.tokenizer import Tokenizer

MOST_FORCED_CALLS = 16
# Regular expressions.
_ALL = "(?s:.*)"
_BLANK = r"[\s\x1c-\x1f]"  # may stand before the first call
_JSON_BLANK = r"[ \t\n\r]"
_FILLER = r"[ \t\n\r,;\[\]]"  # may stand between the start of a list and its first call


def forced_calls(form: ToolFormat, functions: Sequence[Function], several: bool, tokenizer: Tokenizer) -> str:
    """Of an answer that is a call of one of `functions`, or `several` calls. Raises GrammarError."""
    parts = (form.opening, form.separator, form.closing)
    opening, separator, closing = (written(form, part, tokenizer) for part in parts)
    more = f"({separator} call){{0,{MOST_FORCED_CALLS - 1}}}" if several else ""
    return _grammar(
        f"start: {opening} call {more} {closing}",
        *calls(form, functions, None),
        *arguments(form, [_schema(each) for each in functions], tokenizer),
    )


def text_or_calls(
    form: ToolFormat, functions: Sequence[Function], several: bool, tokenizer: Tokenizer
) -> str:
    """Of an answer that is a text in which a call may begin, or `several`. The arguments of strict functions
    follow their schemas. Raises GrammarError.

    Behind a call text may come where a family marks how calls end; else nothing but more calls does.
    """
    marked, more = _marked(form, several, tokenizer)
    start = f"({marked})* text" if form.end and several else "text" if form.leads else f"text | {marked}"
    if form.bare or form.leads:
        start += f" | first {more}"
    return _grammar(
        f"start: {start}",
        *_text(form, functions, tokenizer),
        *calls(form, functions, _before_first(form)),
        *_arguments(form, functions, tokenizer),
    )


def json_or_calls(
    form: ToolFormat,
    functions: Sequence[Function],
    several: bool,
    tokenizer: Tokenizer,
    schema: dict[str, Any],
) -> str:
    """Of an answer that is JSON by `schema`, or as above a call or several. Raises GrammarError, also where
    JSON may hold a call."""
    if form.bare or form.leads or form.named:
        raise GrammarError("an answer of this model cannot be told from a call of a strict function")
    marked, _ = _marked(form, several, tokenizer)
    return _grammar(
        f"start: text | ({marked}){'+' if form.end and several else ''}",
        f"text: {json_rule(schema)}",
        f"marked: /{SPACE}/ {written(form, form.start, tokenizer)}",
        *calls(form, functions, None),
        *_arguments(form, functions, tokenizer),
    )


def _marked(form: ToolFormat, several: bool, tokenizer: Tokenizer) -> tuple[str, str]:
    """A call behind its mark, or several behind one, and what may stand behind the first of them."""
    again = written(form, form.separator, tokenizer) if form.named else loose(form.separator)
    more = f"({again} call)*" if several and not form.end else ""
    closed = f"/{SPACE}/ {written(form, form.end, tokenizer)}" if form.end else loose(form.closing)
    return f"marked {loose(form.opening.removeprefix(form.start))} call {more} {closed}", f"{more} {closed}"


def _text(form: ToolFormat, functions: Sequence[Function], tokenizer: Tokenizer) -> Iterator[str]:
    """`text` that holds no call, and `marked`: a text and what starts a call.

    Special tokens may stand in a text, but not amid what would be a call without them: they may not be shown.
    """
    specials = tokenizer.special_ids - tokenizer.eos_ids - {tokenizer.token_id(form.start)}
    aside = f"(SAFE? <[{','.join(map(str, sorted(specials)))}]>)*" if specials else ""
    yield f"text: {aside} TEXT?"
    if tokenizer.is_special(form.start):
        yield f"marked: text {written(form, form.start, tokenizer)}"
    else:
        yield f"marked: {aside} mark"
        yield f"mark[lazy]: TEXT {written(form, form.start, tokenizer)}"
    yield f"TEXT: /{_ALL}/{_but(_calling(form, functions))}"
    yield f"SAFE: TEXT{_but(_perhaps_calling(form))}"


def _but(expressions: Iterator[str]) -> str:
    return "".join(f" & ~/{each}/" for each in expressions)


def _calling(form: ToolFormat, functions: Sequence[Function]) -> Iterator[str]:
    """Expressions of texts that hold a call, or would if it were written to its end."""
    if not form.leads:
        yield f"{_ALL}{escaped(form.start)}{_ALL}"
    led = rf"{_BLANK}*\[{_FILLER}*" if form.leads else f"{_BLANK}*"
    names = "|".join(escaped(each.name) for each in functions)
    if form.python:
        yield rf"{led}({names})\({_ALL}"
    elif form.bare or form.leads:  # a name may be escaped
        yield rf'{led}\{{{_ALL}"name"{_JSON_BLANK}*:{_JSON_BLANK}*"(({names})"|[^"]*\\){_ALL}'


def _perhaps_calling(form: ToolFormat) -> Iterator[str]:
    """Expressions of texts that might become one of those."""
    if form.bare:
        yield rf"{_BLANK}*\{{{_ALL}"
    if form.leads:
        yield rf"{_BLANK}*\[{_ALL}"
    else:
        begun = [escaped(form.start[:length]) for length in range(1, len(form.start))]
        yield f"{_ALL}({'|'.join(begun)})"


def _before_first(form: ToolFormat) -> str | None:
    """The expression of what stands before a call that an answer begins with, where that needs no mark."""
    if form.leads:
        return rf"{_BLANK}{{0,40}}\["
    return f"{_BLANK}{{0,40}}" if form.bare else None


def _arguments(form: ToolFormat, functions: Sequence[Function], tokenizer: Tokenizer) -> Iterator[str]:
    return arguments(form, [_schema(each) if each.strict else None for each in functions], tokenizer)


def _schema(function: Function) -> dict[str, Any]:
    return function.parameters or {"type": "object"}


def _grammar(*rules: str) -> str:
    return lark_grammar("\n".join(rules) + "\n")
