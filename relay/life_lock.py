"""A file that a process keeps locked for as long as it lives.

The kernel frees the lock when the last thread of the process has left, however it ends, so who finds it free
knows that none of them writes any more. It needs no pid: containers that share the folder see who has died.
"""

import fcntl
from pathlib import Path


class LifeLock:
    """Held from now on, until this process ends."""

    def __init__(self, folder: str, boot: str) -> None:
        """Raises OSError when `folder` cannot be written."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._file = (Path(folder) / boot).open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    @property
    def path(self) -> str:
        return self._file.name


def is_free(path: str) -> bool:
    """True when its holder is gone. False also means that there is no such file here."""
    try:
        with Path(path).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
