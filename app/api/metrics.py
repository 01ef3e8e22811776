"""GET /metrics, for Prometheus."""

from flask import Blueprint, Response
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from app.gateway.service import service

resource = Blueprint("metrics", __name__)


@resource.get("/metrics")
def show() -> Response:
    return Response(generate_latest(service().meters.registry), content_type=CONTENT_TYPE_LATEST)
