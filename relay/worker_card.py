"""What a worker tells the others about itself."""

import json
import os
from pathlib import Path
from typing import NamedTuple

from relay.geometry import Geometry


class Incarnation(NamedTuple):
    """One life of one process. On the host and pid namespace of `host`, its death can be proven."""

    boot: str
    host: str
    pid: int
    start_ticks: int

    @classmethod
    def here(cls, boot: str) -> "Incarnation":
        return cls(boot, host_identity(), os.getpid(), start_ticks(os.getpid()) or 0)

    def proven_dead(self) -> bool:
        """True only when this process can see that the other is gone; False also means "cannot tell"."""
        return self.host == host_identity() and start_ticks(self.pid) != self.start_ticks

    def to_json(self) -> str:
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Incarnation":
        return cls(*json.loads(text))


class Load(NamedTuple):
    """Sent with each renewal. `slots`: how many more legs the worker could claim now; `free_tokens`: how long
    one may be."""

    slots: int
    free_tokens: int
    running: int
    waiting: int
    free_pages: int
    cached_pages: int
    held_pages: int
    quarantined_pages: int


class WorkerCard(NamedTuple):
    """Published under the worker's boot id; gone 10 s after the last renewal. `role`: prefill, decode or
    unified."""

    incarnation: Incarnation
    name: str
    role: str
    geometry: Geometry
    capacity_tokens: int
    agent_metadata: bytes
    load: Load

    @property
    def boot(self) -> str:
        return self.incarnation.boot


def host_identity() -> str:
    """Kernel boot and pid namespace: where a pid means the same process."""
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{kernel}/{os.readlink('/proc/self/ns/pid')}"


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, or None when no thread of it runs any more."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    # A killed process is a zombie at once; a thread of it may still be inside a system call that writes.
    return None if fields[0] in "ZX" and len(threads) <= 1 else int(fields[19])
