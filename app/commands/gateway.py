"""`kvrelay gateway`."""

import click

from app.launch import programs
from relay.settings import Settings


@click.command()
def gateway() -> None:
    """Run the HTTP gateway."""
    from app.gateway.keys import KeyRing

    # A key file that cannot be used is told here, not in a traceback.
    KeyRing.from_settings(Settings.from_env())
    programs.become(programs.gateway_command(), {})
