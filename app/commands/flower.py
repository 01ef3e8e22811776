"""`kvrelay flower`."""

import click

from app.launch import programs
from relay.settings import Settings


@click.command()
def flower() -> None:
    """Run Flower, which shows the running legs."""
    settings = Settings.from_env()
    programs.become(programs.flower_command(settings), programs.flower_env(settings.host))
