"""/v1/pools: the workers that live now, their pages, and what queues before them."""

from typing import Any

from flask import Blueprint, Response

from app.gateway.conditional import unless_known
from app.gateway.service import Service, service
from relay.answers import Waiting
from relay.request import Leg
from relay.routing import short_name
from relay.worker_card import WorkerCard

resource = Blueprint("pools", __name__)


@resource.get("/v1/pools")
def show() -> Response:
    """At most a second old; workers tell of themselves once a second."""
    s = service()
    return unless_known(s.recent.get("pools", lambda: _pools(s)))


def _pools(s: Service) -> dict[str, Any]:
    return {
        "object": "pools",
        "model": s.model,
        "queues": {leg.value: _queue(s.rooms.waiting(leg)) for leg in (Leg.PREFILL, Leg.DECODE)},
        "workers": [_worker(card, s.model) for card in sorted(s.rooms.workers(), key=lambda card: card.name)],
    }


def _queue(waiting: Waiting) -> dict[str, Any]:
    """`since`: when the leg that is next came into the queue, in seconds since the epoch."""
    return {"legs": waiting.legs, "since": round(waiting.since_ms / 1000, 3) if waiting.since_ms else None}


def _worker(card: WorkerCard, model: str) -> dict[str, Any]:
    load = card.load
    return {
        "id": card.boot,
        "name": short_name(card.name, model),
        "host": card.name.partition("@")[2],
        "role": card.role,
        "running": load.running,
        "waiting": load.waiting,
        "slots": load.slots,
        "page_size": card.geometry.page_size,
        "pages": {
            "free": load.free_pages,
            "held": load.held_pages,
            "cached": load.cached_pages,
            "quarantined": load.quarantined_pages,
        },
    }
