"""`kvrelay flower`."""

from pathlib import Path

import click

from app.launch import programs
from relay.settings import Settings


@click.command()
def flower() -> None:
    """Run Flower, which shows the running legs."""
    settings = Settings.from_env()
    Path(settings.var_dir).mkdir(parents=True, exist_ok=True)
    programs.become(programs.flower_command(settings), programs.flower_env(settings.host))
