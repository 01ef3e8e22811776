"""`kvrelay flower`."""

from pathlib import Path

import click

from app.launch import programs
from app.launch.checks import check_folder
from relay.settings import Settings


@click.command()
def flower() -> None:
    """Run Flower, which shows the running legs."""
    settings = Settings.from_env()
    check_folder(Path(settings.var_dir))
    programs.become(programs.flower_command(settings), programs.flower_env(settings.host))
