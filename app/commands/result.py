"""`kvrelay result`."""

import json

import click

from app.commands.answer import show_answer
from app.commands.api_client import ApiClient
from app.commands.options import gateway, no_color


@click.command()
@click.argument("request_id")
@click.option("--stream", is_flag=True, help="Print the answer as it comes, from its beginning.")
@click.option("--json", "as_json", is_flag=True, help="Print its record as it is now; with --stream, events.")
@click.option("--cancel", is_flag=True, help="Cancel it first.")
@gateway
@no_color
def result(client: ApiClient, request_id: str, stream: bool, as_json: bool, cancel: bool) -> int:
    """Print the answer to an earlier request, waiting for its end.

    Ctrl-C stops waiting, and cancels nothing.

    \b
    Examples:
      kvrelay result req-5c1f…
      kvrelay result --json req-5c1f… | jq .ledger
      kvrelay result --cancel req-5c1f…
    """
    if cancel:
        client.delete(f"/v1/requests/{request_id}")
    if as_json and not stream:
        click.echo(json.dumps(client.get(f"/v1/requests/{request_id}"), indent=2))
        return 0
    return show_answer(client, request_id, streamed=stream, as_json=as_json)
