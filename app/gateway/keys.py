"""API keys: who a secret stands for. Only hashes are kept.

A key is 32 random bytes, so a plain SHA-256 cannot be searched backwards; there is no password to stretch.
"""

import hashlib
import logging
import os
import re
import secrets
import threading
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from relay.log import event
from relay.settings import Settings, SettingsError

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1.0
_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"


class Caller(NamedTuple):
    """Who a request belongs to. A limit of 0 is none. Without keys everybody is the one with no name."""

    name: str
    admin: bool = False
    requests_per_minute: int = 0
    tokens_per_minute: int = 0

    def may_see(self, owner: str) -> bool:
        return self.admin or self.name == owner


EVERYBODY = Caller("")


class _Entry(BaseModel):
    """One table of the key file."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    admin: bool = False
    requests_per_minute: int = Field(0, ge=0)
    tokens_per_minute: int = Field(0, ge=0)


_FILE = TypeAdapter(dict[Annotated[str, Field(pattern=_NAME)], _Entry])


class KeyRing:
    """Every key there is. Thread-safe; a changed key file holds within a second, without a restart."""

    def __init__(self, fixed: Mapping[str, Caller], path: Path | None) -> None:
        """`fixed` maps hashes to callers. Raises SettingsError for a file that cannot be used."""
        self._fixed = fixed
        self._path = path
        self._lock = threading.Lock()
        self._looked_at = time.monotonic()
        self._version = _version(path)
        self._callers = {**fixed, **_read(path)}

    @classmethod
    def from_settings(cls, settings: Settings) -> "KeyRing":
        fixed = {}
        if settings.api_key:
            fixed[digest(settings.api_key)] = Caller("default")
        if settings.admin_key:
            fixed[digest(settings.admin_key)] = Caller("admin", admin=True)
        return cls(fixed, Path(settings.api_keys_file) if settings.api_keys_file else None)

    def caller(self, secret: str | None) -> Caller | None:
        """None: a key is needed, and this is none. Where there are only admin keys everybody may call."""
        callers = self._current()
        if secret and (found := callers.get(digest(secret))):
            return found
        return None if self._path or any(not each.admin for each in callers.values()) else EVERYBODY

    def _current(self) -> Mapping[str, Caller]:
        now = time.monotonic()
        if self._path and now - self._looked_at >= _LOOK_AGAIN_S and self._lock.acquire(blocking=False):
            try:
                self._looked_at = now
                self._reload()
            finally:
                self._lock.release()
        return self._callers

    def _reload(self) -> None:
        version = _version(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self._callers = {**self._fixed, **_read(self._path)}
        except SettingsError as error:
            # Half-written, or wrong: the keys of before go on, rather than locking everybody out.
            event(log, "keys_kept", logging.ERROR, error=error)
        else:
            event(log, "keys_read", count=len(self._callers))


def digest(secret: str) -> str:
    """How a key is stored and looked up."""
    return hashlib.sha256(secret.encode()).hexdigest()


def new_key() -> str:
    return f"kvr-{secrets.token_urlsafe(32)}"


def check_name(name: str) -> None:
    """Raises ValueError for a name that a key file may not hold."""
    if not re.fullmatch(_NAME, name):
        raise ValueError(f"{name!r} is no name: up to 64 letters, digits, _ . and -, a letter or digit first")


def stanza(name: str, secret: str, admin: bool = False) -> str:
    """The lines that give `secret` a place in the key file. Quoted, since a dot may begin a table within."""
    return f'["{name}"]\nsha256 = "{digest(secret)}"\n' + ("admin = true\n" if admin else "")


def _version(path: Path | None) -> tuple[int, int, int] | None:
    """Changes when the file does, also when another one takes its place."""
    try:
        found = os.stat(path) if path else None
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino) if found else None


def _read(path: Path | None) -> dict[str, Caller]:
    """Hash → caller."""
    if path is None:
        return {}
    try:
        entries = _FILE.validate_python(tomllib.loads(path.read_text()))
    except OSError as error:
        raise SettingsError(f"API_KEYS_FILE={path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise SettingsError(f"API_KEYS_FILE={path}: {place}: {first['msg']}") from None
    except ValueError as error:
        raise SettingsError(f"API_KEYS_FILE={path} is no TOML: {error}") from None
    if len({entry.sha256 for entry in entries.values()}) < len(entries):
        raise SettingsError(f"API_KEYS_FILE={path}: two names have the same key: make one for each")
    return {
        entry.sha256: Caller(name, entry.admin, entry.requests_per_minute, entry.tokens_per_minute)
        for name, entry in entries.items()
    }
