"""Where the bytes of files lie: a folder, or a bucket of any server that speaks S3."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, from_url

from app.gateway.errors import ApiError, unavailable
from relay.settings import Settings, SettingsError

_READ_BYTES = 1 << 20
_PART_BYTES = 8 << 20  # S3 takes parts of 5 MiB and more
_PARTS_AT_ONCE = 2


class Storage:
    """Objects by name. What is being written is not there until it is whole, whoever dies. Thread-safe.

    Methods raise ApiError (503) when the storage cannot be used now.
    """

    def __init__(self, settings: Settings) -> None:
        """A bucket takes credentials, region and endpoint from the AWS_* variables. Raises SettingsError."""
        url = settings.files_url or str(Path(settings.var_dir) / "files")
        self._folder = None if "://" in url else Path(url).absolute()
        try:
            self._store = from_url(url) if self._folder is None else LocalStore(self._folder, mkdir=True)
        except (BaseError, OSError) as error:
            raise SettingsError(f"FILES_URL={url!r} cannot be used: {error}") from None

    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        """Create or replace an object. It survives a crash of this machine, as far as the storage can."""
        try:
            with obstore.open_writer(
                self._store, name, buffer_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE
            ) as writer:
                for piece in pieces:
                    writer.write(piece)
            self._sync(name)
        except (BaseError, OSError) as error:
            raise _away(error) from error

    def size(self, name: str) -> int | None:
        """In bytes; None: there is no such object."""
        try:
            return int(obstore.head(self._store, name)["size"])
        except FileNotFoundError:
            return None
        except (BaseError, OSError) as error:
            raise _away(error) from error

    def read(self, name: str) -> Iterator[bytes]:
        """The content, piece by piece. Raises FileNotFoundError, at the first piece."""
        try:
            for piece in obstore.get(self._store, name).stream(min_chunk_size=_READ_BYTES):
                yield bytes(piece)
        except FileNotFoundError:
            raise
        except (BaseError, OSError) as error:
            raise _away(error) from error

    def delete(self, *names: str) -> None:
        """Objects that are not there are no error."""
        for name in names:
            try:
                with suppress(FileNotFoundError):
                    obstore.delete(self._store, name)
            except (BaseError, OSError) as error:
                raise _away(error) from error

    def names(self, prefix: str) -> list[str]:
        """The objects below a folder."""
        try:
            return [found["path"] for page in obstore.list(self._store, prefix) for found in page]
        except (BaseError, OSError) as error:
            raise _away(error) from error

    def _sync(self, name: str) -> None:
        """A bucket keeps what it has taken; a folder may still have it in memory only."""
        if self._folder is None:
            return
        path = self._folder / name
        for each in (path, path.parent):
            number = os.open(each, os.O_RDONLY)
            try:
                os.fsync(number)
            finally:
                os.close(number)


def _away(error: Exception) -> ApiError:
    return unavailable(f"The storage of files cannot be used: {type(error).__name__}.", "storage_away")
