"""A worker's meters that nobody scrapes."""

from prometheus_client import CollectorRegistry

from relay.settings import Settings
from workers.meters import Meters


def meters(**settings: int) -> Meters:
    return Meters(Settings(**settings), CollectorRegistry())
