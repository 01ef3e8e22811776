"""Answers that are asked for again and again."""

from typing import Any

from flask import Response, jsonify, request


def unless_known(body: Any) -> Response:
    """`body` as JSON with an ETag; 304 for a client that says by If-None-Match that it has it."""
    response = jsonify(body)
    response.add_etag()
    response.make_conditional(request)
    return response
