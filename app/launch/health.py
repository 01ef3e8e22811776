"""Whether the process of this container is alive and gets on, asked from a second process beside it."""

import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from http.client import HTTPException
from typing import NamedTuple

from app.launch.address import base_url
from relay.settings import Settings
from relay.worker_card import Incarnation, WorkerCard, host_identity

TIMEOUT_S = 4.0


class Health(NamedTuple):
    good: bool
    said: str


def of_worker(settings: Settings) -> Health:
    """The card is renewed while the engine's step is within its deadline: one that is there says both."""
    from redis.exceptions import RedisError

    from relay.protocol import ProtocolMismatch
    from relay.redis_client import AWAY
    from relay.rooms import Rooms

    try:
        cards = Rooms(settings.redis_url, settings.model_name).workers()
    except AWAY as error:
        # No reason to restart a worker, which holds KV that it will need.
        return Health(True, f"Redis is away, so the worker cannot be asked for: {error}")
    except RedisError as error:
        return Health(False, f"What answers at REDIS_URL is no Redis for kvrelay: {error}")
    except ProtocolMismatch as error:
        return Health(False, str(error))
    card = worker_here(cards, host_identity(), socket.gethostname())
    if card is None:
        return Health(False, "No worker of this container is registered: it starts, or its engine is stuck.")
    running, waiting = card.load.running, card.load.waiting
    return Health(True, f"{card.name} is registered; {running} running, {waiting} waiting.")


def worker_here(cards: Iterable[WorkerCard], host: str, hostname: str) -> WorkerCard | None:
    """The living worker of this pid namespace; where containers share one, the host name tells them apart."""
    here = (card for card in cards if _lives_here(card.incarnation, host))
    return next((card for card in here if card.name.endswith(f"@{hostname}")), None)


def _lives_here(incarnation: Incarnation, host: str) -> bool:
    return incarnation.host == host and not incarnation.proven_dead()


def of_gateway(settings: Settings) -> Health:
    return _fetched(f"{base_url(settings.host, settings.port)}/ready")


def of_flower(settings: Settings) -> Health:
    return _fetched(f"{base_url(settings.host, settings.flower_port)}/healthcheck")


def of_redis(settings: Settings) -> Health:
    from redis.exceptions import RedisError

    from relay.redis_client import probe_client

    try:
        with probe_client(settings.redis_url, TIMEOUT_S) as client:
            client.ping()
    except RedisError as error:
        return Health(False, f"Redis does not answer: {error}")
    return Health(True, "Redis answers.")


def _fetched(url: str) -> Health:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return Health(True, response.read().decode().strip())
    except urllib.error.HTTPError as error:
        return Health(False, error.read().decode().strip())
    except (OSError, HTTPException) as error:
        return Health(False, f"{url} does not answer: {getattr(error, 'reason', error)}")


CHECKS: dict[str, Callable[[Settings], Health]] = {
    "worker": of_worker,
    "gateway": of_gateway,
    "flower": of_flower,
    "redis": of_redis,
}
