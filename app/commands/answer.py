"""What `submit` and `result` show of a request."""

import json
import os
import sys

import click

from app.commands.api_client import ApiClient, Object
from app.launch.display import Display


def show_answer(client: ApiClient, request_id: str, *, streamed: bool, as_json: bool) -> int:
    """Wait for the end of a request and print its text, or as it comes. 0: it finished. 1: it did not.

    As JSON: its record, or an object a line for each token and for the end.
    """
    display = Display(sys.stderr) if sys.stderr.isatty() and not streamed else None
    texts: list[str] = []
    end: Object = {}
    for end in client.follow(request_id):
        texts.append(end["text"])
        if display:
            display.step(f"{request_id}: {len(texts)} tokens; Ctrl-C leaves")
        if streamed:
            click.echo(json.dumps(end) if as_json else end["text"], nl=as_json)
    if display:
        display.clear()
    if as_json and not streamed:
        click.echo(json.dumps(client.get(f"/v1/requests/{request_id}"), indent=2))
    elif not as_json:
        click.echo("" if streamed else "".join(texts))
    return conclude(end)


def conclude(end: Object) -> int:
    """The exit status of a request that has ended so; says why where it has no whole answer."""
    if end["status"] == "finished":
        return os.EX_OK
    why = f": {end['error']['message']}" if end["error"] else "."
    click.secho(f"The request is {end['status']}{why}", fg="red", err=True)
    return 1
