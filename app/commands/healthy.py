"""`kvrelay healthy`."""

import click

from app.launch import health
from relay.settings import Settings


@click.command()
@click.argument("part", type=click.Choice(tuple(health.CHECKS)))
def healthy(part: str) -> int:
    """Tell whether this container's PART is alive and gets on.

    For the health check of a container, or a probe of Kubernetes: an exit status of 0 means yes. A worker is
    healthy while it renews its registration, which it stops when its engine does not get on with a step; a
    gateway while requests could be served (its `/ready`); Redis when it answers and has read its data.

    \b
    Examples:
      kvrelay healthy worker
      kvrelay healthy gateway
    """
    health_of_part = health.CHECKS[part](Settings.from_env())
    click.echo(health_of_part.said)
    return 0 if health_of_part.good else 1
