"""A file that a process keeps locked for as long as it lives.

The kernel frees the lock when the last thread of the process has left, however it ends, so who finds it free
knows that none of them writes any more. It needs no pid: containers that share the folder see who has died.
The file outlives its process, since others may ask for that proof, but not for ever: see `sweep`.
"""

import fcntl
import os
import re
import time
from pathlib import Path

KEEP_S = 2 * 86_400  # nobody waits for a proof for longer: QUARANTINE_AGE_S is a day at most
ALIVE_S = 0.0  # the time that a file bears until somebody has found it free

_BOOT = re.compile(r"(prefill|decode|unified)-[0-9a-f]{16}")


class LifeLock:
    """Held from now on, until this process ends."""

    def __init__(self, folder: str, boot: str) -> None:
        """Raises OSError when `folder` cannot be read and written."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        sweep(folder, time.time())
        self._file = (Path(folder) / boot).open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        os.utime(self._file.fileno(), (ALIVE_S, ALIVE_S))

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


def sweep(folder: str, now_s: float) -> None:
    """Mark the files in `folder` that are free, and delete those that were marked more than KEEP_S ago.

    No process takes its own file along, not even at an orderly end: peers may ask after it. `now_s` is Unix
    time; where that jumps a file may go early, and who still asks cannot tell and waits for its own restart.
    """
    for path in Path(folder).iterdir():
        if not _BOOT.fullmatch(path.name):  # not of a worker
            continue
        try:
            with path.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                marked_s = os.fstat(file.fileno()).st_mtime
                if marked_s == ALIVE_S:
                    os.utime(file.fileno(), (now_s, now_s))
                elif now_s - marked_s > KEEP_S:
                    path.unlink()
        except OSError:  # its owner lives, another sweeps, or it belongs to another user
            continue
