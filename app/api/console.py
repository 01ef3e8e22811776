"""/console: pages for people. They hold no data: their scripts call the API, with the key they are given."""

from importlib.resources import files

from flask import Blueprint, Response, make_response, render_template, request, send_from_directory

_FOLDER = str(files("app").joinpath("console"))
# Nothing from elsewhere, no inline script or style, and no text that becomes HTML.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)

resource = Blueprint("console", __name__, template_folder=f"{_FOLDER}/pages")


@resource.get("/console", strict_slashes=False)
def overview() -> Response:
    return _page("overview")


@resource.get("/console/requests/<request_id>")
def show(request_id: str) -> Response:
    """The same page for every id: what there is to see is for the API to say."""
    return _page("request")


@resource.get("/console/static/<name>")
def asset(name: str) -> Response:
    return _guarded(send_from_directory(_FOLDER, name))


def _page(name: str) -> Response:
    """`name`: of its content, its script and its style; what is around it is in frame.html."""
    response = make_response(render_template(f"{name}.html", page=name))
    response.headers["Cache-Control"] = "no-cache"
    response.add_etag()
    response.make_conditional(request)
    return _guarded(response)


def _guarded(response: Response) -> Response:
    response.headers["Content-Security-Policy"] = _POLICY
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Referrer-Policy"] = "no-referrer"
    response.headers["Cross-Origin-Opener-Policy"] = "same-origin"
    return response
