"""The OpenAPI document, made of the models that check requests, and a page to try it.

GET /openapi.json, GET /docs. (OpenAPI 3.1.0: https://spec.openapis.org/oas/v3.1.0)
"""

import re
from functools import cache
from typing import Any

from flask import Blueprint, Response, jsonify, redirect, send_from_directory
from pydantic import TypeAdapter
from swagger_ui_bundle import swagger_ui_path
from werkzeug.wrappers import Response as WerkzeugResponse

from app.api.info import VERSION
from app.gateway.service import service
from app.openapi import shapes
from app.openapi.operations import OPERATIONS, Operation

resource = Blueprint("openapi", __name__)

_REF = "#/components/schemas/{model}"
_START = """\
window.ui = SwaggerUIBundle({url: "../openapi.json", dom_id: "#swagger-ui", deepLinking: true,
  presets: [SwaggerUIBundle.presets.apis], layout: "BaseLayout", tryItOutEnabled: true});
"""
_UPLOAD = {
    "type": "object",
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}},
    "required": ["file", "purpose"],
}
Json = dict[str, Any]


@resource.get("/openapi.json")
def show() -> Response:
    return jsonify(document(service().model))


@resource.get("/docs")
def page() -> WerkzeugResponse:
    return redirect("docs/index.html")


@resource.get("/docs/<path:name>")
def asset(name: str) -> Response:
    if name == "swagger-initializer.js":
        return Response(_START, content_type="text/javascript")
    return send_from_directory(swagger_ui_path, name)


@cache
def document(model: str) -> Json:
    """`model` is an example of the name that clients send."""
    adapters = {key: TypeAdapter(key) for op in OPERATIONS for key in (op.body, op.reply) if _is_typed(key)}
    adapters[shapes.Error] = TypeAdapter(shapes.Error)
    found, definitions = TypeAdapter.json_schemas(
        [(key, "validation", adapter) for key, adapter in adapters.items()], ref_template=_REF
    )
    schemas = {key: schema for (key, _), schema in found.items()}
    paths: dict[str, Json] = {}
    for op in OPERATIONS:
        paths.setdefault(op.path, {})[op.method.lower()] = _operation(op, schemas)
    bodies = {op.body.__name__ for op in OPERATIONS if _is_typed(op.body)}
    parts: Json = definitions.get("$defs", {})
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvrelay", "version": VERSION, "description": f"Serves {model}."},
        "paths": paths,
        "components": {
            "schemas": {
                name: _with_nulls(each) if _is_asked(name, bodies) else each for name, each in parts.items()
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _is_typed(key: Any) -> bool:
    return key is not None and not isinstance(key, str)


def _is_asked(name: str, bodies: set[str]) -> bool:
    """Whether a schema is of something that clients send: shapes of replies are those of `app.shapes`."""
    return name in bodies or not hasattr(shapes, name)


def _with_nulls(schema: Json) -> Json:
    """Null means absent, so every property that may be absent may be null."""
    required = schema.get("required", [])
    properties = {
        name: each if name in required else {"anyOf": [each, {"type": "null"}]}
        for name, each in schema.get("properties", {}).items()
    }
    return schema | {"properties": properties} if properties else schema


def _operation(op: Operation, schemas: dict[Any, Json]) -> Json:
    shown: Json = {
        "summary": op.summary,
        "tags": [op.tag],
        "operationId": re.sub(r"\W+", "_", f"{op.method.lower()}{op.path}").strip("_"),
        "responses": {
            str(op.status): {"description": op.summary, "content": _content(op, schemas)},
            "4XX": _error("The request is at fault; `param` names the field"),
            "5XX": _error("The server is; the same request may be sent again"),
        },
    }
    if op.path == "/ready":
        shown["responses"]["503"] = shown["responses"]["200"]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", op.path)
    ]
    parameters += [{"name": name, "in": "query", "schema": {"type": kind}} for name, kind in op.query]
    if parameters:
        shown["parameters"] = parameters
    if op.body is not None:
        kind, schema = (
            (op.body, _UPLOAD) if isinstance(op.body, str) else ("application/json", schemas[op.body])
        )
        shown["requestBody"] = {"required": True, "content": {kind: {"schema": schema}}}
    return shown


def _content(op: Operation, schemas: dict[Any, Json]) -> Json:
    if op.reply is None:
        return {"text/html": {}}
    if isinstance(op.reply, str):
        return {op.reply: {}}
    shown: Json = {"application/json": {"schema": schemas[op.reply]}}
    return shown | {"text/event-stream": {}} if op.streams else shown


def _error(description: str) -> Json:
    schema = {"$ref": _REF.format(model="Error")}
    return {"description": description, "content": {"application/json": {"schema": schema}}}
