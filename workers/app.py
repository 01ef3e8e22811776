"""What `celery -A workers.app worker` runs: the app of all processes, and what only workers do."""

from typing import Any

from celery.worker.control import control_command

from relay.celery import FLUSH_CACHE, app
from workers.reaper import Reaper

app.steps["worker"].add(Reaper)


@control_command(name=FLUSH_CACHE)  # type: ignore[untyped-decorator]
def flush_cache(state: Any) -> int:
    """Forget the prefix cache of this worker; answers how many pages were in it."""
    return int(state.consumer.pool.flush_cache())


__all__ = ["app"]
