"""`kvrelay up` as a user runs it: what it says, what it starts, and that nothing is left."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from relay.model_file import default_model_path
from tests.processes import inside, marked, until
from tests.servers import free_port


class Up:
    """One `kvrelay up` in a folder of its own; its processes are known by their VAR_DIR."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.var = folder / "var"
        self.mark = f"VAR_DIR={self.var}"
        self.output = folder / "output"
        self.url = f"http://127.0.0.1:{free_port()}"
        self.flower_url = f"http://127.0.0.1:{free_port()}"
        ports = {"PORT": self.url.rpartition(":")[2], "FLOWER_PORT": self.flower_url.rpartition(":")[2]}
        clean = {name: value for name, value in os.environ.items() if name not in ("REDIS_URL", "BROKER_URL")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "app.cli", "up"],
            cwd=Path(__file__).parents[2],
            env={**clean, "VAR_DIR": str(self.var), "KV_POOL_MB": "64", **ports, **env},
            stdout=self.output.open("w"),
            stderr=subprocess.STDOUT,
        )

    def said(self) -> str:
        return self.output.read_text()

    def says(self, text: str) -> None:
        def shown() -> bool:
            assert self.process.poll() is None, self.said()
            return text in self.said()

        until(shown, f"it says {text!r}", deadline_s=90.0)

    def ended(self) -> int:
        return self.process.wait(timeout=60.0)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        print(self.said())
        until(lambda: not self.processes(), "nothing is left behind")

    def processes(self) -> list[int]:
        return marked(self.mark) + inside(self.var / "valkey")

    def pid(self, name: str) -> int | None:
        """The living process of one of its workers."""
        for pid in marked(self.mark):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if any(word.startswith(f"{name}.".encode()) and word.endswith(b"@%h") for word in words):
                return pid
        return None

    def in_flower(self, request_id: str) -> dict[str, str]:
        """The states in which Flower shows the tasks of a request, by task name."""
        with urllib.request.urlopen(f"{self.flower_url}/api/tasks", timeout=5) as response:
            tasks = json.load(response)
        return {t["name"]: t["state"] for task_id, t in tasks.items() if task_id.startswith(request_id)}

    def requests(self) -> list[str]:
        with urllib.request.urlopen(f"{self.url}/v1/requests", timeout=5) as response:
            return [record["id"] for record in json.load(response)["data"]]

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5):
                return True
        except OSError:
            return False


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def up(**env: str) -> Up:
        started.append(Up(tmp_path, **env))
        return started[-1]

    yield up
    for each in started:
        each.end()


def test_up_serves_heals_and_leaves_nothing(up: Callable[..., Up]) -> None:
    launcher = up()
    launcher.says("Ctrl-C stops everything.")
    assert "primary colors are" in launcher.said()
    for leg in ("prefill", "transfer", "decode", "total"):
        assert re.search(rf"^  {leg} +[\d.]+ ms", launcher.said(), re.MULTILINE)

    done = {"kvrelay.prefill": "SUCCESS", "kvrelay.decode": "SUCCESS"}
    (asked,) = launcher.requests()  # the launcher's own first question
    for worker in ("prefill-1", "decode-1"):
        connections = psutil.Process(launcher.pid(worker)).net_connections("tcp")
        assert {connection.laddr.ip for connection in connections} == {"127.0.0.1"}, "it needs no network"
    until(lambda: launcher.in_flower(asked) == done, "Flower shows both legs")

    doomed = until(lambda: launcher.pid("decode-1"), "the decode worker is found")
    os.kill(doomed, signal.SIGKILL)
    until(lambda: launcher.pid("decode-1") not in (None, doomed), "there is a new decode worker")
    until(launcher.ready, "requests are served again", deadline_s=60.0)
    assert "died program=decode-1" in launcher.said()

    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.ended() == 0
    assert launcher.said().endswith("Stopped.\n")


def test_kill_9_of_the_launcher_leaves_nothing(up: Callable[..., Up]) -> None:
    launcher = up(PREFILL_WORKERS="0", DECODE_WORKERS="0", UNIFIED_WORKERS="1")
    launcher.says("Ctrl-C stops everything.")
    assert len(launcher.processes()) >= 6
    launcher.process.kill()
    until(lambda: launcher.processes() == [], "all its processes are gone")


def test_a_signal_while_starting_ends_everything(up: Callable[..., Up]) -> None:
    launcher = up()
    launcher.says("waiting for")
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.ended() == 0
    until(lambda: launcher.processes() == [], "nothing is left")


def test_two_in_one_folder_are_refused(up: Callable[..., Up]) -> None:
    first = up()
    first.says("starting")
    second = up()
    assert second.ended() == os.EX_CONFIG
    assert "Another kvrelay runs in" in second.said()


def test_a_model_that_breaks_the_workers_ends_up_with_their_message(
    up: Callable[..., Up], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    shutil.copy(default_model_path(), broken)
    os.truncate(broken, broken.stat().st_size // 2)
    launcher = up(MODEL=str(broken))
    assert launcher.ended() != 0
    assert re.search(r"(prefill|decode)-1 exited with status 78 while starting", launcher.said())
    assert "broken.gguf" in launcher.said()


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"MODEL": "/no/such.gguf"}, "/no/such.gguf does not exist: set MODEL to"),
        ({"REDIS_URL": "redis://127.0.0.1:1/0"}, "REDIS_URL=redis://127.0.0.1:1/0 does not answer"),
        ({"REDIS_URL": "localhost"}, "REDIS_URL cannot be used"),
        ({"PORT": "70000"}, "PORT='70000' cannot be used"),
        ({"CORES": "900"}, "CORES='900' names [900]"),
        ({"DECODE_WORKERS": "0"}, "set PREFILL_WORKERS and DECODE_WORKERS, or UNIFIED_WORKERS"),
        ({"HOST": "0.0.0.0"}, "set FLOWER_BASIC_AUTH=user:password"),
        ({"VAR_DIR": "/proc/kvrelay"}, "Cannot write to /proc/kvrelay"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    up: Callable[..., Up], env: dict[str, str], says: str
) -> None:
    launcher = up(**env)
    assert launcher.ended() == os.EX_CONFIG
    assert says in launcher.said()
    assert "Traceback" not in launcher.said()


@pytest.mark.parametrize("variable", ["PORT", "FLOWER_PORT"])
def test_a_taken_port_is_named(up: Callable[..., Up], variable: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launcher = up(**{variable: str(port)})
        assert launcher.ended() == os.EX_CONFIG
    assert f"Cannot listen on 127.0.0.1:{port}" in launcher.said()
    assert f"as in {variable}={port + 1}" in launcher.said()
