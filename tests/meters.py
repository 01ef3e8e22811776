"""A worker's meters that nobody scrapes."""

from typing import Any

from prometheus_client import CollectorRegistry

from relay.settings import Settings
from workers.meters import Meters


def meters(**settings: Any) -> Meters:
    return Meters(Settings(**settings), CollectorRegistry())
