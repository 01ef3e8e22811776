"""A batch processor as a process, and the lines that tests give it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from app.launch.supervisor import die_with_parent
from tests.gateway_rig import START_S
from tests.processes import until

ROOT = Path(__file__).parents[1]


class ProcessorProcess:
    """`kvrelay batches` with the environment of a gateway or relay."""

    def __init__(self, log: Path, **env: str) -> None:
        self._log = log
        self._env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | env

    def __enter__(self) -> Self:
        parent = os.getpid()
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "app.cli", "batches"],
                cwd=ROOT,
                env=self._env,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: die_with_parent(parent),
            )
        until(self._ready, f"a processor starts: {self._log}", START_S)
        return self

    def _ready(self) -> bool:
        assert self.process.poll() is None, self.said()
        return " ready " in self.said()

    def said(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(10)

    def __exit__(self, *_: object) -> None:
        self.kill()


def chat_lines(count: int, **body: Any) -> Iterator[dict[str, Any]]:
    """Requests for a few words each, all different."""
    for i in range(count):
        yield {
            "custom_id": f"line-{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"number {i}", "max_tokens": 4, **body},
        }


def as_file(lines: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def results(content: bytes) -> dict[str, dict[str, Any]]:
    """By custom id; asserts that each comes once."""
    found = [json.loads(line) for line in content.splitlines()]
    by_id = {each["custom_id"]: each for each in found}
    assert len(by_id) == len(found), "a line was written twice"
    return by_id
