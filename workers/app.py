"""What `celery -A workers.app worker` runs: the app of all processes, and what only workers do."""

from relay.celery import app
from workers.reaper import Reaper

app.steps["worker"].add(Reaper)

__all__ = ["app"]
