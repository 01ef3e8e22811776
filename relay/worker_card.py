"""What a worker tells the others about itself."""

import json
import os
import secrets
from pathlib import Path
from typing import NamedTuple

from relay.geometry import Geometry
from relay.life_lock import is_free


class Incarnation(NamedTuple):
    """One life of one process. Its death can be proven in the pid namespace of `host`, and where the file
    `lock` is seen on that machine, unless it has none."""

    boot: str
    host: str
    pid: int
    start_ticks: int
    lock: str = ""

    @classmethod
    def here(cls, boot: str, lock: str = "") -> "Incarnation":
        return cls(boot, host_identity(), os.getpid(), start_ticks(os.getpid()) or 0, lock)

    @property
    def far(self) -> bool:
        """It runs where no memory is shared: on another machine, or in another container."""
        return self.host != host_identity()

    def proven_dead(self) -> bool:
        """True only when this process can see that the other is gone; False also means "cannot tell"."""
        here = host_identity()
        if self.host == here:
            try:
                return start_ticks(self.pid) != self.start_ticks
            except PermissionError:
                pass
        return self.lock != "" and _kernel(self.host) == _kernel(here) and is_free(self.lock)

    def to_json(self) -> str:
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Incarnation":
        return cls(*json.loads(text))


class Load(NamedTuple):
    """Sent with each renewal. `slots`: how many more legs the worker could claim now; `free_tokens`: how long
    one may be. `pinned_pages` are those of the held ones that a peer writes, or a send reads."""

    slots: int
    free_tokens: int
    running: int
    waiting: int
    free_pages: int
    cached_pages: int
    held_pages: int
    quarantined_pages: int
    pinned_pages: int = 0


class WorkerCard(NamedTuple):
    """Published under the worker's boot id; gone 10 s after the last renewal. `role`: prefill, decode or
    unified. `metrics`: host:port where it answers Prometheus, or nothing."""

    incarnation: Incarnation
    name: str
    role: str
    geometry: Geometry
    capacity_tokens: int
    agent_metadata: bytes
    load: Load
    metrics: str = ""

    @property
    def boot(self) -> str:
        return self.incarnation.boot


def new_boot(role: str) -> str:
    """The id of one life of a worker."""
    return f"{role}-{secrets.token_hex(8)}"


def role_of(boot: str) -> str:
    return boot.partition("-")[0]


def host_identity() -> str:
    """Kernel boot and pid namespace: where a pid means the same process."""
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{kernel}/{os.readlink('/proc/self/ns/pid')}"


def _kernel(host: str) -> str:
    return host.partition("/")[0]


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, or None when no thread of it runs any more.

    Raises PermissionError when there is such a process and /proc hides it, as systemd's ProtectProc does.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        _check_absent(pid)
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    # A killed process is a zombie at once; a thread of it may still be inside a system call that writes.
    return None if fields[0] in "ZX" and len(threads) <= 1 else int(fields[19])


def _check_absent(pid: int) -> None:
    """Raises PermissionError when there is such a process after all, of whatever user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return
    raise PermissionError(f"/proc hides process {pid}")
