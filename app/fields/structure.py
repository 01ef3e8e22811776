"""The form that a client wants its answer to have, in every spelling that clients send."""

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from app.gateway.errors import invalid
from app.gateway.strict import Strict
from relay.grammar import (
    GrammarError,
    Grammars,
    choice_grammar,
    json_grammar,
    regex_grammar,
    rules_grammar,
)
from relay.tokenizer import Tokenizer

Choices = list[str]
Schema = dict[str, Any] | str  # a text holds the JSON of one
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_STRUCTURES = ("json", "json_object", "regex", "choice", "grammar")


class JsonSchema(Strict):
    """`strict` changes nothing: a schema is always followed."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    body: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Strict):
    """A schema may also stand in it without a name, as clients of llama.cpp send it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    unnamed: dict[str, Any] | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> "ResponseFormat":
        if self.json_schema is not None and self.type != "json_schema":
            raise ValueError("json_schema goes with type json_schema only")
        if self.unnamed is not None and (self.type == "text" or self.json_schema is not None):
            raise ValueError("schema goes with type json_object, or json_schema without another")
        if self.type == "json_schema" and self.wanted is None:
            raise ValueError("type json_schema needs json_schema")
        return self

    @property
    def wanted(self) -> dict[str, Any] | None:
        """The schema of the answer; None: any text."""
        if self.json_schema is not None:
            return self.json_schema.body
        return _ANY_OBJECT if self.unnamed is None and self.type == "json_object" else self.unnamed


class StructuredOutputs(Strict):
    """One of these. The options of vLLM, of how JSON is written, are not offered."""

    json_: Schema | None = Field(None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: Choices | None = Field(None, min_length=1)
    grammar: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_that_is_known(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if unknown := [name for name in data if name not in _STRUCTURES and data[name]]:
            raise ValueError(f"{unknown[0]} is not supported")
        if all(data.get(name, False) is False for name in _STRUCTURES):
            raise ValueError(f"asks for nothing: give one of {', '.join(_STRUCTURES)}")
        return data


class Wanted(NamedTuple):
    """One form, under the name of its field. `make` gives its grammar, or raises GrammarError.

    `schema` where the form is JSON. If the grammar fails, `instead` is wanted if it is there; else what is
    wrong with one of `parts` is told, if anything is.
    """

    param: str
    make: Callable[[], str]
    schema: Callable[[], dict[str, Any]] | None = None
    parts: "Sequence[Wanted]" = ()
    instead: "Sequence[Wanted] | None" = None


class Structure(Strict):
    """At most one of these fields may be given."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = Field(None, min_length=1)
    guided_grammar: str | None = None
    json_schema: Schema | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None

    def structures(self, tokenizer: Tokenizer) -> list[Wanted]:
        """Those that are given."""
        found = [*self._guided(), *self._of_format(), *self._structured()]
        return [wanted for wanted in found if wanted is not None]

    def _guided(self) -> list[Wanted | None]:
        return [
            _json("guided_json", self.guided_json),
            _text("guided_regex", self.guided_regex, regex_grammar),
            _choice("guided_choice", self.guided_choice),
            _text("guided_grammar", self.guided_grammar, rules_grammar),
            _json("json_schema", self.json_schema),
            _text("regex", self.regex, regex_grammar),
            _text("ebnf", self.ebnf, rules_grammar),
            _text("grammar", self.grammar, rules_grammar),
        ]

    def _of_format(self) -> list[Wanted | None]:
        form = self.response_format
        return [] if form is None else [_json("response_format", form.wanted)]

    def _structured(self) -> list[Wanted | None]:
        given = self.structured_outputs
        if given is None:
            return []
        return [
            _json("structured_outputs", given.json_),
            _json("structured_outputs", _ANY_OBJECT if given.json_object else None),
            _text("structured_outputs", given.regex, regex_grammar),
            _choice("structured_outputs", given.choice),
            _text("structured_outputs", given.grammar, rules_grammar),
        ]


def only_grammar(structures: Sequence[Wanted], grammars: Grammars) -> str | None:
    """The grammar of the one structure that is wanted. Raises ApiError for two, and for one that is wrong."""
    if not structures:
        return None
    first, *others = structures
    if others:
        raise invalid(f"{others[0].param} cannot be combined with {first.param}.", others[0].param)
    try:
        grammar = first.make()
        grammars.check(grammar)
    except GrammarError as error:
        if first.instead is not None:
            return only_grammar(first.instead, grammars)
        for part in first.parts:
            only_grammar([part], grammars)
        raise invalid(f"{first.param}: {error}.", first.param) from None
    return grammar


def _json(param: str, schema: Schema | None) -> Wanted | None:
    if schema is None:
        return None
    return Wanted(param, lambda: json_grammar(_loaded(schema)), schema=lambda: _loaded(schema))


def _text(param: str, text: str | None, make: Callable[[str], str]) -> Wanted | None:
    return None if text is None else Wanted(param, lambda: make(text))


def _choice(param: str, choices: Choices | None) -> Wanted | None:
    return None if choices is None else Wanted(param, lambda: choice_grammar(choices))


def _loaded(schema: Schema) -> dict[str, Any]:
    if isinstance(schema, dict):
        return schema
    try:
        found = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is not valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise GrammarError("the schema must be a JSON object")
    return found
