"""/health: is this process there? /ready: could a request be served now?"""

from flask import Blueprint, Response, jsonify

from app.gateway.errors import RETRY_AFTER_S, ApiError
from app.gateway.service import service

resource = Blueprint("health", __name__)


@resource.get("/health")
def health() -> Response:
    if not service().follower.alive():
        raise ApiError(500, "The reader of token streams has died: restart this gateway.", code="reader_died")
    return jsonify({"status": "ok"})


@resource.get("/ready")
def ready() -> Response:
    without, age_ms = service().readiness.verdict()
    response = jsonify({"ready": not without, "missing": without, "age_ms": round(age_ms)})
    if without:
        response.status_code = 503
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response
