"""The Jinja template that turns a conversation into a prompt, as `transformers` renders it.

Templates come with models and are not trusted: they run in Jinja's sandbox.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from relay.model_file import ModelError


class ChatTemplateError(ValueError):
    """The template refused these messages, or failed on them; the client's to mend."""


class ChatTemplate:
    """A compiled template. Threads may share it. `knows_tools`: it tells the model of `tools`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are what templates may name: bos_token, eos_token and so on.

        Raises ModelError if the template does not compile.
        """
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            used = meta.find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise ModelError(f"the chat template does not compile ({error}): mend the template") from error
        self._special_tokens = dict(special_tokens)
        self.source = source
        self.knows_tools = "tools" in used

    def render(
        self, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The prompt for `messages`; `kwargs` are further variables, of any name, such as tools.

        Raises ChatTemplateError.
        """
        optional = {"tools": None, "documents": None}
        variables = self._special_tokens | optional | kwargs
        try:
            return self._template.render(
                variables, messages=messages, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            raise ChatTemplateError(f"the chat template refused these messages: {error.message}") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise ChatTemplateError(f"the chat template failed on these messages: {error}") from error


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes HTML, which no model has seen in training.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
