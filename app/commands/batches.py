"""`kvrelay batches`."""

import os

import click

from relay.settings import Settings


@click.command()
def batches() -> None:
    """Run a batch processor."""
    from app.batch.batch_processor import BatchProcessor
    from relay import log

    settings = Settings.from_env()
    log.configure(settings.log_level)
    BatchProcessor(settings).serve()
    os._exit(0)  # at once: the threads of open lines have nothing to lose
