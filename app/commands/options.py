"""Options that several commands share."""

from collections.abc import Mapping
from typing import Any

import click

from app.commands.api_client import ApiClient
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


def _client(_: click.Context, __: click.Parameter, url: str | None) -> ApiClient:
    settings = Settings.from_env()
    host = "127.0.0.1" if settings.host == "0.0.0.0" else settings.host
    return ApiClient(url or f"http://{host}:{settings.port}", settings.api_key or settings.admin_key)


def gateway(command: Any) -> Any:
    """The command gets a `client` of the gateway that --url names."""
    option = click.option(
        "--url",
        "client",
        callback=_client,
        metavar="URL",
        help="The gateway; default: http://HOST:PORT. Its key comes from API_KEY.",
    )
    return option(command)
