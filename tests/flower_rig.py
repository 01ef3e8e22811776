"""A real Flower, and what it answers."""

import json
import os
import subprocess
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from app.launch.programs import flower_command
from app.launch.supervisor import die_with_parent
from relay.settings import Settings
from tests.servers import free_port


class FlowerProcess:
    def __init__(self, env: Mapping[str, str], folder: Path) -> None:
        self._env = {**os.environ, **env, "FLOWER_UNAUTHENTICATED_API": "true"}
        self._folder = folder
        self._port = free_port()

    def __enter__(self) -> Self:
        parent = os.getpid()
        settings = Settings(host="127.0.0.1", flower_port=self._port, var_dir=str(self._folder))
        with (self._folder / "flower.log").open("wb") as log:
            self._process = subprocess.Popen(
                flower_command(settings),
                cwd=self._folder,
                env=self._env,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: die_with_parent(parent),
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def workers(self) -> set[str]:
        """Asked anew; none while it starts."""
        return set(self._fetch("workers?refresh=1"))

    def messages(self) -> list[int]:
        """In each queue."""
        return [queue["messages"] for queue in self._fetch("queues/length").get("active_queues", ())]

    def _fetch(self, what: str) -> Any:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/api/{what}", timeout=10) as response:
                return json.load(response)
        except OSError:
            return {}
