"""kvrelay itself, started by `kvrelay up` on free ports with a folder of its own."""

import os
import socket
import sys
import tempfile
from pathlib import Path
from types import TracebackType

import httpx
import psutil

from bench.kept import Kept

START_S = 180.0


class System:
    """As a context manager: serves while inside. `env` holds settings, such as PREFILL_WORKERS."""

    def __init__(self, **env: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvrelay-bench-")
        ports = {"PORT": str(free_port()), "FLOWER_PORT": str(free_port())}
        self._env = {**os.environ, "VAR_DIR": self._folder.name, "LOG_LEVEL": "WARNING", **ports, **env}
        self.url = f"http://127.0.0.1:{ports['PORT']}"
        self._kept: Kept | None = None

    def __enter__(self) -> "System":
        command = [sys.executable, "-m", "app.cli", "up"]
        self._kept = Kept(command, self._env, Path(self._folder.name) / "up.log")
        try:
            self._kept.wait_until(self._ready, START_S)
        except BaseException:
            self.__exit__(None)
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        assert self._kept is not None
        self._kept.stop()
        self._folder.cleanup()

    def log(self) -> str:
        assert self._kept is not None
        return self._kept.log()

    @property
    def redis_url(self) -> str:
        return self.processes()["gunicorn"].environ()["REDIS_URL"]

    @property
    def logs(self) -> Path:
        """The folder with a log of each process."""
        return Path(self._folder.name) / "log"

    def processes(self) -> dict[str, psutil.Process]:
        """The running processes by the name of their program, such as `prefill-1`."""
        assert self._kept is not None
        up = self._kept.processes()[0]
        found = {"up": up}
        for process in up.children():
            name = _program(process.cmdline())
            found[name] = process
            found |= {f"{name} child": child for child in process.children()}
        return found

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=2).status_code == 200 and "curl" in self.log()
        except httpx.HTTPError:
            return False


def _program(command: list[str]) -> str:
    if "-n" in command:
        return command[command.index("-n") + 1].split(".")[0]
    for word in ("gunicorn", "flower", "valkey", "batches"):
        if any(word in part for part in command):
            return word
    return Path(command[0]).name


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
