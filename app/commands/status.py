"""`kvrelay status`."""

import json
import os
import sys
import time

import click

from app.commands.api_client import ApiAway, ApiClient, Object
from app.commands.options import gateway, no_color
from app.measure.table import aligned

_EVERY_S = 1.0
_HEADER = (
    "worker",
    "host",
    "role",
    "running",
    "waiting",
    "free slots",
    "KV tokens",
    "held",
    "cached",
    "quarantined",
)


@click.command()
@click.option("--watch", is_flag=True, help="Again each second, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="As one line of JSON.")
@gateway
@no_color
def status(client: ApiClient, watch: bool, as_json: bool) -> int:
    """Show the pools: what runs, what waits, and how full they are.

    The exit status is 0 where a request could be served now, and 1 where something is missing.

    \b
    Examples:
      kvrelay status --watch
      kvrelay status --json | jq '.workers[].running'
    """
    if not watch:
        found = client.get("/v1/pools")
        click.echo(_shown(found, client.base_url, as_json))
        return 1 if _missing(found) else 0
    try:
        while True:
            try:
                text = _shown(client.get("/v1/pools"), client.base_url, as_json)
            except ApiAway as away:
                text = str(away)
            if sys.stdout.isatty() and not as_json and os.environ.get("TERM") != "dumb":
                click.clear()
            click.echo(text)
            time.sleep(_EVERY_S)
    except KeyboardInterrupt:
        return 0


def _missing(found: Object) -> list[str]:
    roles = {worker["role"] for worker in found["workers"]}
    return [f"no {role} worker" for role in ("prefill", "decode") if not roles & {role, "unified"}]


def _shown(found: Object, url: str, as_json: bool) -> str:
    if as_json:
        return json.dumps(found)
    missing = _missing(found)
    state = click.style(", ".join(missing) or "ready", fg="red" if missing else "green", bold=True)
    queued = ", ".join(f"{queue['legs']} {leg}" for leg, queue in found["queues"].items())
    lines = [f"{found['model']} at {url}: {state}", f"legs in the queues: {queued}"]
    if found["workers"]:
        lines += ["", aligned(_HEADER, [_row(worker) for worker in found["workers"]])]
    return "\n".join(lines)


def _row(worker: Object) -> tuple[object, ...]:
    pages = worker["pages"]
    total = sum(pages.values())
    shares = [f"{100 * pages[state] / total:.0f} %" for state in ("held", "cached", "quarantined")]
    counts = (worker["running"], worker["waiting"], worker["slots"], total * worker["page_size"])
    return (worker["name"], worker["host"], worker["role"], *counts, *shares)
