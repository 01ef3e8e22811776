"""A whole kvrelay to point clients at, and what its records say of them."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple, Self

from tests.servers import free_port

MODEL = "default"
START_S = 120.0
STOP_S = 60.0


class Served(NamedTuple):
    """Requests of a client, as the server has them."""

    requests: int
    unfinished: list[dict[str, Any]]
    prompt_tokens: int
    completion_tokens: int


class Server:
    """`kvrelay up` with a prefill and a decode worker, in float32, so that scores can be compared."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / "up.log"
        self._environ = os.environ | {
            "MODEL": str(model),
            "SERVED_NAME": MODEL,
            "DTYPE": "float32",
            "PORT": str(self.port),
            "FLOWER_PORT": str(free_port()),
            "VAR_DIR": str(folder / "var"),
            "GRACE_S": "5",
        }
        self._seen: set[str] = set()

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            command = [sys.executable, "-m", "app.cli", "up"]
            self._process = subprocess.Popen(command, env=self._environ, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + START_S
        while "Ctrl-C stops everything." not in self._log.read_text():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, f"kvrelay did not start\n{self._log.read_text()}"
            time.sleep(0.1)
        self.served()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def served(self) -> Served:
        """What has come since the last call."""
        records = []
        page = self._get("/v1/requests?limit=1000")
        while page["data"]:
            records += [record for record in page["data"] if record["id"] not in self._seen]
            page = (
                self._get(f"/v1/requests?limit=1000&before={page['before']}")
                if page["before"]
                else {"data": []}
            )
        self._seen |= {record["id"] for record in records}
        return Served(
            requests=len(records),
            unfinished=[record for record in records if record["status"] != "finished"],
            prompt_tokens=sum(record["usage"]["prompt_tokens"] for record in records),
            completion_tokens=sum(record["usage"]["completion_tokens"] for record in records),
        )

    def _get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as response:
            return dict(json.load(response))
