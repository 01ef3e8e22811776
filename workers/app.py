"""What `celery -A workers.app worker` runs: the app of all processes, and what only workers do."""

from typing import Any

from celery.worker.control import control_command

from relay.celery import FLUSH_CACHE, app
from workers.reaper import Reaper

app.steps["worker"].add(Reaper)
# Flower knows what waits by the bell of the gateway; what a worker rings for it shows as prefill meanwhile.
app.conf.task_send_sent_event = False


@control_command(name=FLUSH_CACHE)  # type: ignore[untyped-decorator]
def flush_cache(state: Any) -> int:
    """Forget the prefix cache of this worker; answers how many pages were in it."""
    return int(state.consumer.pool.flush_cache())


__all__ = ["app"]
