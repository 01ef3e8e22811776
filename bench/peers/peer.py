"""One system to compare: how it is started, what it can be asked, how it ends."""

from abc import ABC, abstractmethod
from types import TracebackType

import psutil

from app.measure.closed_loop import Seen
from bench.peers.load import Load


class Peer(ABC):
    """Runs while inside the context."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def missing(self) -> str | None:
        """What this machine lacks to run it, and how to name where it is; None when all is there."""

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None:
        """Leaves no process, also when `start` failed half way."""

    @abstractmethod
    def run(self, load: Load) -> Seen: ...

    @abstractmethod
    def processes(self) -> list[tuple[str, psutil.Process]]:
        """What runs on the cores for it, by a name for the reader."""

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of its processes since they began."""
        used: dict[str, float] = {}
        for name, process in self.processes():
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            used[name] = used.get(name, 0.0) + times.user + times.system
        return used

    def __enter__(self) -> "Peer":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
