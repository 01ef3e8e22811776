"""/v1/models: the one model this deployment serves."""

from typing import Any

from flask import Blueprint, Response, jsonify

from app.gateway.service import Service, service
from app.generation.submit import no_such_model

resource = Blueprint("models", __name__)


@resource.get("/v1/models")
def list_all() -> Response:
    return jsonify({"object": "list", "data": [_view(service())]})


@resource.get("/v1/models/<path:name>")
def show(name: str) -> Response:
    s = service()
    if name != s.model:
        raise no_such_model(name)
    return jsonify(_view(s))


def _view(s: Service) -> dict[str, Any]:
    return {
        "id": s.model,
        "object": "model",
        "created": s.started,
        "owned_by": "kvrelay",
        "max_model_len": s.context_tokens,
    }
