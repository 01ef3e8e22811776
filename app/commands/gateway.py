"""`kvrelay gateway`."""

import os

import click

from app.launch import programs
from relay.settings import Settings


@click.command()
def gateway() -> None:
    """Run the HTTP gateway."""
    from app.gateway.keys import KeyRing
    from app.tracing.tracing import can_trace

    # Told here, not in a traceback: a key file that cannot be used, traces that cannot be exported.
    KeyRing.from_settings(Settings.from_env())
    can_trace(os.environ)
    programs.become(programs.gateway_command(), {})
