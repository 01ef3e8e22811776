"""`kvrelay batches`."""

import os

import click

from relay.settings import Settings


@click.command()
def batches() -> None:
    """Run a batch processor."""
    from app.batch.batch_processor import BatchProcessor
    from relay import log
    from relay.protocol import check_protocol
    from relay.rooms import root_key

    settings = Settings.from_env()
    check_protocol(settings.redis_url, root_key(settings.model_name))
    log.configure(settings.log_level)
    BatchProcessor(settings).serve()
    os._exit(0)  # at once: the threads of open lines have nothing to lose
