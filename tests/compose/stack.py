"""The containers of docker-compose.yml, as a project of their own."""

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.commands.api_client import ApiAway, ApiClient

ROOT = Path(__file__).parents[2]
PROJECT = "kvrelay-test"
PORT, FLOWER_PORT = 21480, 21481
COMMAND_S = 1_200.0
READY_S = 120.0


class Stack:
    """Each call ends when compose is done; raises AssertionError with its output when that fails."""

    def __init__(self) -> None:
        self._compose = [*_compose(), "-p", PROJECT]
        self._env = {
            **os.environ,
            "PORT": str(PORT),
            "FLOWER_PORT": str(FLOWER_PORT),
            "DTYPE": "float32",  # a text does not depend on what else is in its batch
            "THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2)),  # for each of two workers
        }
        if "TORCH" not in os.environ and _base_brings_torch():
            self._env["TORCH"] = "torch==2.13.0"
        self.client = ApiClient(f"http://127.0.0.1:{PORT}", "")

    def compose(self, *words: str) -> str:
        return _run([*self._compose, *words], self._env)

    def build(self) -> None:
        self.compose("build", "-q", "redis")

    def up(self, *scale: str) -> None:
        """Start what does not run; `scale` as in decode=2."""
        self.compose("up", "-d", "--no-build", *(word for each in scale for word in ("--scale", each)))

    def down(self, *options: str) -> None:
        self.compose("down", *options)

    def containers(self, service: str) -> list[str]:
        return self.compose("ps", "-q", service).split()

    def crash(self, container: str) -> None:
        """End its processes as a lack of memory would; the engine starts it again."""
        began = _started(container)
        subprocess.run(["docker", "exec", container, "sh", "-c", "kill -9 -1"], capture_output=True)
        until(lambda: _started(container) not in ("", began), "the engine has started it again")

    def remove(self, service: str) -> None:
        """Kill and remove its containers; `up` makes new ones, with other addresses and names."""
        _run(["docker", "rm", "-f", *self.containers(service)])

    def ready(self) -> None:
        until(lambda: self._ask("/ready").get("ready"), "a request could be served")

    def healthy(self, service: str) -> None:
        found = self.containers(service)
        until(lambda: all(_health(container) == "healthy" for container in found), f"{service} is healthy")

    def workers(self, role: str) -> int:
        """How many are registered."""
        return sum(worker["role"] == role for worker in self._ask("/v1/pools").get("workers", ()))

    def all_pages_back(self) -> None:
        """Nothing is held for requests that are over, nor for those who may have died while they wrote."""
        until(lambda: not self._taken_pages(), "no page is held or in quarantine")

    def _taken_pages(self) -> int:
        pages = [worker["pages"] for worker in self._ask("/v1/pools").get("workers", ())]
        return sum(each["held"] + each["quarantined"] for each in pages) if pages else -1

    def _ask(self, path: str) -> dict[str, Any]:
        try:
            return self.client.get(path)
        except ApiAway:
            return {}


def until(what: Callable[[], object], said: str, deadline_s: float = READY_S) -> None:
    deadline = time.monotonic() + deadline_s
    while not what():
        assert time.monotonic() < deadline, f"not within {deadline_s:g} s: {said}"
        time.sleep(0.1)


def image_bytes(image: str) -> int:
    return int(_run(["docker", "image", "inspect", "-f", "{{.Size}}", image]))


def _health(container: str) -> str:
    return _run(["docker", "inspect", "-f", "{{.State.Health.Status}}", container]).strip()


def _started(container: str) -> str:
    """When its process began; empty while there is none."""
    state = json.loads(_run(["docker", "inspect", "-f", "{{json .State}}", container]))
    return state["StartedAt"] if state["Running"] else ""


def _compose() -> list[str]:
    newer = subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0
    return ["docker", "compose"] if newer else ["docker-compose"]


def _base_brings_torch() -> bool:
    base = os.environ.get("BASE", "python:3.11-slim-bookworm")
    look = ["docker", "run", "--rm", base, "sh", "-c", "ls ${PIP_FIND_LINKS:-/nowhere}/torch-*"]
    return subprocess.run(look, capture_output=True).returncode == 0


def _run(command: list[str], env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=COMMAND_S)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout
