"""Options that several commands share."""

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import click

from app.commands.api_client import ApiClient
from app.launch.address import base_url
from relay.settings import Settings


def without_color(env: Mapping[str, str]) -> bool:
    """Whether the environment asks for plain text. Where there is no terminal click writes none anyway."""
    return bool(env.get("NO_COLOR")) or env.get("TERM") == "dumb"


def _plain(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        ctx.color = False


no_color = click.option(
    "--no-color", is_flag=True, expose_value=False, callback=_plain, help="Plain text, as with NO_COLOR."
)


def _client(_: click.Context, param: click.Parameter, url: str | None) -> ApiClient:
    if url is not None and not url.startswith(("http://", "https://")):
        raise click.BadParameter(f"{url!r} is no URL, as http://127.0.0.1:8000 is.", param=param)
    settings = Settings.from_env()
    # OpenAI's clients are told a URL with /v1, so that one is at hand.
    named = url and url.rstrip("/").removesuffix("/v1")
    return ApiClient(named or base_url(settings.host, settings.port), settings.api_key or settings.admin_key)


def gateway(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command gets a `client` of the gateway that --url names."""
    option = click.option(
        "--url",
        "client",
        callback=_client,
        metavar="URL",
        help="The gateway; default: http://HOST:PORT. Its key comes from API_KEY.",
    )
    return option(command)


def sampling(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command gets `fields` of the body of a request."""

    @click.option("--max-tokens", type=click.IntRange(min=1), help="The longest answer.")
    @click.option("--temperature", type=click.FloatRange(0, 2), help="0: always the likeliest token.")
    @click.option(
        "-F",
        "--field",
        "pairs",
        multiple=True,
        metavar="NAME=VALUE",
        help="Any other field of the API, the value in JSON or plain, as top_p=0.9. May be repeated.",
    )
    @functools.wraps(command)
    def wrapped(
        max_tokens: int | None, temperature: float | None, pairs: tuple[str, ...], **others: Any
    ) -> Any:
        named = {"max_tokens": max_tokens, "temperature": temperature}
        fields = {name: value for name, value in named.items() if value is not None}
        return command(fields=fields | dict(map(_field, pairs)), **others)

    return wrapped


def _field(pair: str) -> tuple[str, Any]:
    name, equals, text = pair.partition("=")
    if not name or not equals:
        raise click.BadParameter(f"{pair!r} is no NAME=VALUE, as in top_p=0.9.", param_hint="--field")
    try:
        return name, json.loads(text)
    except ValueError:
        return name, text
