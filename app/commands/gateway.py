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
    from relay.protocol import check_protocol
    from relay.rooms import root_key

    # Told here, not in a traceback: a key file that cannot be used, traces that cannot be exported, another
    # version.
    settings = Settings.from_env()
    KeyRing.from_settings(settings)
    can_trace(os.environ)
    check_protocol(settings.redis_url, root_key(settings.model_name))
    programs.become(programs.gateway_command(), {})
