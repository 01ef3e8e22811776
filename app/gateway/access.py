"""Who calls: every request gets its caller before anything else looks at it."""

from typing import cast

from flask import g, request

from app.gateway.errors import ApiError
from app.gateway.keys import Caller
from app.gateway.line import current_line
from app.gateway.service import service

# What a load balancer, Prometheus or a reader of the documentation asks for, and the console page without its
# data. None of it tells of a request.
OPEN = frozenset(
    {
        "/health",
        "/ready",
        "/ping",
        "/metrics",
        "/metrics/cluster",
        "/version",
        "/openapi.json",
        "/docs",
        "/console",
    }
)
_OPEN_FOLDERS = ("/docs/", "/console/")


def identify() -> None:
    """Raises ApiError (401) unless the caller is known or the path is open to all."""
    line = current_line()
    found = Caller(line.owner) if line else service().keys.caller(_secret())
    if found is None and not _is_open(request.path) and request.method != "OPTIONS":
        raise ApiError(
            401, "A valid API key is needed: send it as Authorization: Bearer <key>.", code="invalid_api_key"
        )
    g.caller = found


def _is_open(path: str) -> bool:
    return path in OPEN or path.startswith(_OPEN_FOLDERS)


def caller() -> Caller:
    """Whose call this is."""
    return cast(Caller, g.caller)


def check_admin() -> None:
    """Raises ApiError (403) for all but admins."""
    if not caller().admin:
        raise ApiError(403, "Only an admin key may do this: see ADMIN_KEY.", code="admin_only")


def _secret() -> str | None:
    kind, _, secret = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return secret.strip()
    return request.headers.get("X-Api-Key")
