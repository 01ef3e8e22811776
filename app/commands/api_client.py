"""A client of the gateway, for commands."""

import json
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

_TIMEOUT_S = 60.0
_PIECE_BYTES = 1 << 20
_PATIENCE_S = 30.0
_RETRY_S = 0.5
_BROKEN = "The answer stopped before its end ({})."

Object = dict[str, Any]


class ApiRefused(Exception):
    """The gateway said no; message and `code` are its own. What is no gateway has no code."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class ApiAway(Exception):
    """Nobody answers, or says to try again later."""


class ApiClient:
    """Methods raise ApiRefused and ApiAway."""

    def __init__(self, base_url: str, key: str) -> None:
        """`base_url` without /v1. `key` empty: none is needed."""
        self.base_url = base_url.rstrip("/")
        self.key = key
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def get(self, path: str) -> Object:
        return self._json("GET", path)

    def post(self, path: str, body: Object, **headers: str) -> Object:
        content = {"Content-Type": "application/json"} | headers
        return self._json("POST", path, json.dumps(body).encode(), content)

    def delete(self, path: str) -> Object:
        return self._json("DELETE", path)

    def follow(self, request_id: str) -> Iterator[Object]:
        """A request's tokens as they come, then its end, which alone has a `status`.

        Where the stream breaks it is taken up again, as long as that works within `_PATIENCE_S`.
        """
        position, broken_at, begun = 0, 0.0, False
        while True:
            try:
                for name, data in self._events(f"/v1/requests/{request_id}/stream?after={position}"):
                    if name == "error":
                        raise ApiRefused(str(data["error"]["message"]))
                    broken_at, begun = 0.0, True
                    yield data
                    if name == "end":
                        return
                    position = data["position"] + 1
            except ApiAway:
                broken_at = broken_at or time.monotonic()
                if not begun or time.monotonic() - broken_at > _PATIENCE_S:
                    raise
                time.sleep(_RETRY_S)

    def _events(self, path: str) -> Iterator[tuple[str, Object]]:
        """Server-sent events by name, until somebody leaves. Raises ApiAway when that was the server."""
        with self._open("GET", path) as response:
            name = "message"
            try:
                for line in response:
                    field, _, value = line.decode().rstrip("\n").partition(": ")
                    if field == "event":
                        name = value
                    elif field == "data":
                        yield name, json.loads(value)
                        name = "message"
            except (OSError, HTTPException) as error:
                raise ApiAway(f"The stream broke off ({error}).") from error
        raise ApiAway("The stream ended without an end.")

    def upload(self, path: Path, purpose: str) -> Object:
        """Send a file, piece by piece."""
        boundary = secrets.token_hex(16)
        disposition = f"--{boundary}\r\nContent-Disposition: form-data; name="
        head = (
            f'{disposition}"purpose"\r\n\r\n{purpose}\r\n{disposition}"file"; filename="input.jsonl"\r\n\r\n'
        )
        tail = f"\r\n--{boundary}--\r\n"
        headers = {
            "Content-Type": f"multipart/form-data; boundary={boundary}",
            "Content-Length": str(len(head) + path.stat().st_size + len(tail)),
        }

        def form() -> Iterator[bytes]:
            yield head.encode()
            with path.open("rb") as file:
                while piece := file.read(_PIECE_BYTES):
                    yield piece
            yield tail.encode()

        return self._json("POST", "/v1/files", form(), headers)

    def download(self, path: str, to: Path) -> None:
        """Write what `path` answers; a file is there when it is whole."""
        part = to.with_name(f"{to.name}.part")
        with self._open("GET", path) as response, part.open("wb") as file:
            try:
                while piece := response.read(_PIECE_BYTES):
                    file.write(piece)
            except (OSError, HTTPException) as error:
                raise ApiAway(_BROKEN.format(error)) from error
        part.replace(to)

    def _json(
        self, method: str, path: str, data: Any = None, headers: dict[str, str] | None = None
    ) -> Object:
        with self._open(method, path, data, headers) as response:
            try:
                found: Object = json.load(response)
            except ValueError:
                raise ApiRefused(f"{self.base_url} answers no JSON: give the URL of a gateway.") from None
            except (OSError, HTTPException) as error:
                raise ApiAway(_BROKEN.format(error)) from error
            return found

    def _open(self, method: str, path: str, data: Any = None, headers: dict[str, str] | None = None) -> Any:
        request = urllib.request.Request(
            f"{self.base_url}{path}", data, self._headers | (headers or {}), method=method
        )
        try:
            return urllib.request.urlopen(request, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            with error:
                answer = error.read()
            raise refusal(error.code, answer) from None
        except (OSError, HTTPException) as error:
            raise ApiAway(
                f"{self.base_url} does not answer ({_reason(error)}): start a gateway, as kvrelay up does, or"
                " name another with --url."
            ) from error


def refusal(status: int, answer: bytes) -> ApiAway | ApiRefused:
    """What an answer of that HTTP status means."""
    message, code = _told(answer)
    return ApiAway(message) if status in (429, 502, 503, 504) else ApiRefused(message, code)


def _reason(error: Exception) -> str:
    """Why a server could not be asked, in words."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return str(getattr(cause, "strerror", None) or cause)


def _told(raw: bytes) -> tuple[str, str]:
    """Message and code of an error."""
    try:
        error = json.loads(raw)["error"]
        return str(error["message"]), str(error.get("code", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return raw.decode(errors="replace")[:200], ""
