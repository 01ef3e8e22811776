"""`kvrelay batch`."""

from pathlib import Path

import click

from app.commands.api_client import ApiClient
from app.commands.batch_command import BatchCommand
from app.commands.options import gateway


@click.group()
@gateway
@click.pass_context
def batch(ctx: click.Context, client: ApiClient) -> None:
    """Run a file of requests, and look after such runs.

    \b
    Examples:
      kvrelay batch run requests.jsonl -o answers.jsonl
      kvrelay batch list
    """
    ctx.obj = BatchCommand(client)


@batch.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Answers; default: FILE with .output.jsonl.",
)
@click.option("--window", default="24h", show_default=True, help="When it expires, as 90m or 24h.")
@click.pass_obj
def run(command: BatchCommand, file: Path, output: Path | None, window: str) -> int:
    """Upload FILE, follow, and fetch the answers.

    FILE has one JSON object a line. The same command goes on after an interruption.
    """
    return command.run(file, output, window)


@batch.command("list")
@click.pass_obj
def list_all(command: BatchCommand) -> int:
    """List your batches, newest first."""
    return command.list_all()


@batch.command()
@click.argument("batch_id")
@click.pass_obj
def status(command: BatchCommand, batch_id: str) -> int:
    """Show one batch."""
    return command.status(batch_id)


@batch.command()
@click.argument("batch_id")
@click.pass_obj
def cancel(command: BatchCommand, batch_id: str) -> int:
    """Stop it and keep what is finished."""
    return command.cancel(batch_id)
