"""`kvrelay submit`."""

import json
import sys
from typing import IO

import click

from app.commands.answer import show_answer
from app.commands.api_client import ApiClient, Object
from app.commands.options import gateway, no_color, sampling


@click.command()
@click.argument("prompt", required=False)
@click.option("-f", "--file", type=click.File(), help="Read the prompt from a file; - is the standard input.")
@click.option("--system", help="A message of the system before it.")
@click.option("--raw", is_flag=True, help="The prompt as it is, without the model's chat template.")
@click.option("--wait", is_flag=True, help="Wait for the answer and print it.")
@click.option("--stream", is_flag=True, help="Print the answer as it comes.")
@click.option("--json", "as_json", is_flag=True, help="Print what the API answers.")
@sampling
@gateway
@no_color
def submit(
    client: ApiClient,
    prompt: str | None,
    file: IO[str] | None,
    system: str | None,
    raw: bool,
    wait: bool,
    stream: bool,
    as_json: bool,
    fields: Object,
) -> int:
    """Submit a prompt; print its id, or the answer.

    Without --wait and --stream the id is printed at once; `kvrelay result` reads the answer later. With them
    Ctrl-C cancels the request, and so does a pipe that is closed.

    \b
    Examples:
      kvrelay submit "Name three primary colors."
      kvrelay submit --stream --max-tokens 200 "Tell me a story."
      git diff | kvrelay submit --wait --system "Write a commit message."
      kvrelay submit --wait -F 'response_format={"type": "json_object"}' "A colour, as JSON."
    """
    text = prompt if file is None else file.read()
    if text is None and not sys.stdin.isatty():
        text = sys.stdin.read()
    if not text or (prompt is not None and file is not None):
        raise click.UsageError("Give one prompt: as an argument, with --file, or on the standard input.")
    accepted = client.post("/v1/requests", _body(text, system, raw) | fields)
    ids = [each["id"] for each in accepted.get("samples", [accepted])]
    if not (wait or stream):
        click.echo(json.dumps(accepted, indent=2) if as_json else "\n".join(ids))
        return 0
    try:
        return max([show_answer(client, each, streamed=stream, as_json=as_json) for each in ids])
    except (KeyboardInterrupt, BrokenPipeError):
        for each in ids:
            client.delete(f"/v1/requests/{each}")
        raise


def _body(text: str, system: str | None, raw: bool) -> Object:
    if raw:
        return {"prompt": text}
    told = [{"role": "system", "content": system}] if system else []
    return {"messages": [*told, {"role": "user", "content": text}]}
