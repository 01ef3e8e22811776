"""`kvrelay up`."""

import click

from relay.settings import Settings


@click.command()
def up() -> int:
    """Run everything on this machine and answer one question.

    \b
    Examples:
      kvrelay up
      MODEL=/models/Qwen3-0.6B DECODE_WORKERS=2 kvrelay up
    """
    from app.launch.up import Launcher

    return Launcher(Settings.from_env()).run()
