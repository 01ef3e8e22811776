"""A client of the gateway, for commands."""

import json
import secrets
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

_TIMEOUT_S = 60.0
_PIECE_BYTES = 1 << 20

Object = dict[str, Any]


class ApiRefused(Exception):
    """The gateway said no; the message is its own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ApiAway(Exception):
    """Nobody answers, or says to try again later."""


class ApiClient:
    """Methods raise ApiRefused and ApiAway."""

    def __init__(self, base_url: str, key: str) -> None:
        """`base_url` without /v1. `key` empty: none is needed."""
        self.base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def get(self, path: str) -> Object:
        return self._json("GET", path)

    def post(self, path: str, body: Object, **headers: str) -> Object:
        content = {"Content-Type": "application/json"} | headers
        return self._json("POST", path, json.dumps(body).encode(), content)

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
                raise ApiAway(f"The answer stopped before its end ({error}).") from error
        part.replace(to)

    def _json(
        self, method: str, path: str, data: Any = None, headers: dict[str, str] | None = None
    ) -> Object:
        with self._open(method, path, data, headers) as response:
            found: Object = json.load(response)
            return found

    def _open(self, method: str, path: str, data: Any = None, headers: dict[str, str] | None = None) -> Any:
        request = urllib.request.Request(
            f"{self.base_url}{path}", data, self._headers | (headers or {}), method=method
        )
        try:
            return urllib.request.urlopen(request, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            with error:
                message = _message(error.read())
            if error.code in (429, 502, 503, 504):
                raise ApiAway(message) from None
            raise ApiRefused(error.code, message) from None
        except (OSError, HTTPException) as error:
            raise ApiAway(f"{self.base_url} does not answer ({error}).") from error


def _message(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return raw.decode(errors="replace")[:200]
