"""/console: a page for people. It holds no data: its scripts call the API, with the key they are given."""

from importlib.resources import files

from flask import Blueprint, Response, send_from_directory

resource = Blueprint("console", __name__)

_FOLDER = str(files("app").joinpath("console"))
# Nothing from elsewhere, no inline script or style, and no text that becomes HTML.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)


@resource.get("/console", strict_slashes=False)
def overview() -> Response:
    return _file("overview.html")


@resource.get("/console/requests/<request_id>")
def show(request_id: str) -> Response:
    """The same page for every id: what there is to see is for the API to say."""
    return _file("request.html")


@resource.get("/console/static/<name>")
def asset(name: str) -> Response:
    return _file(name)


def _file(name: str) -> Response:
    response = send_from_directory(_FOLDER, name)
    response.headers["Content-Security-Policy"] = _POLICY
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Referrer-Policy"] = "no-referrer"
    response.headers["Cross-Origin-Opener-Policy"] = "same-origin"
    return response
