"""kvrelay itself, started by `kvrelay up` on free ports with a folder of its own."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

import httpx
import psutil

START_S = 180.0


class System:
    """As a context manager: serves while inside. `env` holds settings, such as PREFILL_WORKERS."""

    def __init__(self, **env: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvrelay-bench-")
        ports = {"PORT": str(_free_port()), "FLOWER_PORT": str(_free_port())}
        self._env = {**os.environ, "VAR_DIR": self._folder.name, "LOG_LEVEL": "WARNING", **ports, **env}
        self.url = f"http://127.0.0.1:{ports['PORT']}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "System":
        self._log = (Path(self._folder.name) / "up.log").open("wb")
        command = [sys.executable, "-m", "app.cli", "up"]
        self._process = subprocess.Popen(command, env=self._env, stdout=self._log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + START_S
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"kvrelay up did not start:\n{self.log()}")
            time.sleep(0.2)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(90)
        self._log.close()
        self._folder.cleanup()

    def log(self) -> str:
        return (Path(self._folder.name) / "up.log").read_text(errors="replace")

    def processes(self) -> dict[str, psutil.Process]:
        """The running processes by the name of their program, such as `prefill-1`."""
        assert self._process is not None
        found = {"up": psutil.Process(self._process.pid)}
        for process in found["up"].children():
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
        return command[command.index("-n") + 1].split("@")[0]
    for word in ("gunicorn", "flower", "valkey"):
        if any(word in part for part in command):
            return word
    return command[0]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
