"""What this deployment is: /ping, /version, /load, /server_info, /model_info."""

from importlib.metadata import version
from typing import Any

from flask import Blueprint, Response, jsonify

from app.gateway.service import Service, service
from relay.request import Leg

resource = Blueprint("info", __name__)

VERSION = version("kvrelay")


@resource.route("/ping", methods=["GET", "POST"])
def ping() -> Response:
    return Response(status=200)


@resource.get("/version")
def show_version() -> Response:
    return jsonify({"version": VERSION})


@resource.get("/load")
def load() -> Response:
    """`server_load` is what vLLM calls the requests it has: here those that run or wait, of all gateways."""
    s = service()
    workers = s.rooms.workers()
    queued = sum(s.rooms.waiting(leg).legs for leg in (Leg.PREFILL, Leg.DECODE))
    running = sum(worker.load.running + worker.load.waiting for worker in workers)
    return jsonify({"server_load": queued + running, "queued_legs": queued, "legs_at_workers": running})


@resource.get("/server_info")
@resource.get("/get_server_info")
def server_info() -> Response:
    s = service()
    settings = s.settings
    return jsonify(
        {
            "version": VERSION,
            "served_model_name": s.model,
            "max_model_len": s.context_tokens,
            "dtype": settings.dtype,
            "page_size": settings.page_size,
            "chunk_tokens": settings.chunk_tokens,
            "max_open_requests": settings.max_open_requests,
            "request_timeout_s": settings.request_timeout_s,
            "result_ttl_s": settings.result_ttl_s,
            "workers": _workers(s),
        }
    )


def _workers(s: Service) -> list[dict[str, Any]]:
    return [
        {"name": worker.name, "role": worker.role, "kv_tokens": worker.capacity_tokens}
        for worker in sorted(s.rooms.workers(), key=lambda worker: worker.name)
    ]


@resource.get("/model_info")
@resource.get("/get_model_info")
def model_info() -> Response:
    s = service()
    return jsonify(
        {
            "model_path": s.model,
            "tokenizer_path": s.model,
            "is_generation": True,
            "max_model_len": s.context_tokens,
            "vocab_size": s.tokenizer.vocab_size,
        }
    )
