"""The JSON object in a request's body."""

import hashlib
import json
from typing import Any, NamedTuple, NoReturn

from app.gateway.errors import ApiError, invalid, too_deep


class Body(NamedTuple):
    """`fields` without nulls, since null means absent. Bodies that mean the same have equal digests."""

    fields: dict[str, Any]
    digest: str


def read_body(raw: bytes, content_type: str | None) -> Body:
    """Parse `raw`. Raises ApiError (400, 415) for what is no JSON object of valid text and finite numbers."""
    if content_type and not _is_json(content_type):
        raise ApiError(
            415, f"Send the body as application/json, not {content_type}.", code="unsupported_media_type"
        )
    try:
        fields = _without_nulls(json.loads(raw, parse_constant=_refuse_constant))
    except RecursionError:
        raise too_deep() from None
    except ValueError as error:
        raise invalid(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise invalid("The body must be a JSON object.", code="invalid_json")
    try:
        canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise invalid("The body holds a lone surrogate, which is not text.", code="invalid_unicode") from None
    return Body(fields, hashlib.sha256(canonical).hexdigest())


def _is_json(content_type: str) -> bool:
    kind = content_type.split(";")[0].strip().lower()
    # curl -d says the second one unless told otherwise.
    return kind.endswith("json") or kind in ("application/x-www-form-urlencoded", "text/plain")


# Data of the client's own, where null is a value.
_DATA = {"schema", "json_schema", "json", "guided_json", "parameters", "chat_template_kwargs", "documents"}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: each if name in _DATA else _without_nulls(each)
            for name, each in value.items()
            if each is not None
        }
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")
