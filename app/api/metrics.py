"""For Prometheus: /metrics of this process, /metrics/cluster of all, /metrics/targets where workers are."""

from flask import Blueprint, Response, jsonify
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from app.gateway.service import service

resource = Blueprint("metrics", __name__)


@resource.get("/metrics")
def show() -> Response:
    return _exposed(service().meters.registry)


@resource.get("/metrics/cluster")
def show_cluster() -> Response:
    return _exposed(service().cluster)


@resource.get("/metrics/targets")
def show_targets() -> Response:
    """As `http_sd_configs` reads it."""
    return jsonify(
        [
            {
                "targets": [worker.metrics],
                "labels": {"__meta_kvrelay_role": worker.role, "__meta_kvrelay_worker": worker.name},
            }
            for worker in service().rooms.workers()
            if worker.metrics
        ]
    )


def _exposed(registry: CollectorRegistry) -> Response:
    return Response(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)
