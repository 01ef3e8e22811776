"""/flush_cache and /reset_prefix_cache: make the workers forget the prefixes they keep."""

from flask import Blueprint, Response, jsonify
from kombu.exceptions import OperationalError

from app.gateway.access import check_admin
from app.gateway.errors import unavailable
from app.gateway.service import service

resource = Blueprint("cache", __name__)


@resource.route("/flush_cache", methods=["GET", "POST"])
@resource.post("/reset_prefix_cache")
def flush() -> Response:
    """Of every living worker of the model. What running requests hold stays theirs."""
    from relay.celery import flush_cache  # Celery takes a while to import, and few gateways are asked

    check_admin()
    names = [worker.name for worker in service().rooms.workers()]
    try:
        pages = flush_cache(names)
    except OperationalError as error:
        raise unavailable("The workers cannot be told now: the broker is away.", "broker_away") from error
    if silent := sorted(set(names) - set(pages)):
        raise unavailable(f"These workers did not answer: {', '.join(silent)}.", "workers_silent")
    return jsonify({"success": True, "pages": pages})
