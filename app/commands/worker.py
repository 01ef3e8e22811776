"""`kvrelay worker`."""

import click

from app.launch import programs
from relay.routing import ROLES
from relay.settings import Settings


@click.command()
@click.option("--role", type=click.Choice(ROLES), help="What it serves; default: ROLE.")
@click.option("--name", help="Its name among the workers of this host; default: its role.")
def worker(role: str | None, name: str | None) -> None:
    """Run one worker.

    \b
    Examples:
      kvrelay worker --role prefill
      CUDA_VISIBLE_DEVICES=1 kvrelay worker --role decode --name decode-2
    """
    settings = Settings.from_env()
    role = role or settings.role
    programs.become(programs.worker_command(role, settings.model_name, name), programs.worker_env(role))
