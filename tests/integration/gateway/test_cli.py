"""`kvrelay submit`, `result`, `chat`, `status`, `bench`, as processes, on a real gateway."""

import json
import os
import pty
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.request import Finish, State, Token
from relay.rooms import Rooms
from tests.gateway_rig import DEADLINE_S, ROOT, Answering, GatewayProcess, ScriptedWorker, eventually
from tests.servers import free_port

MODEL = f"cli-{secrets.token_hex(4)}"
TEXT = " one two three"
BIN = Path(sys.executable).parent


@pytest.fixture
def env(gateway: GatewayProcess) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "API_KEY")}
    return clean | {"PORT": str(gateway.port), "TERM": "xterm", "PATH": f"{BIN}:{clean['PATH']}"}


def run(env: dict[str, str], *arguments: str, given: str = "") -> tuple[int, str, str]:
    command = [sys.executable, "-m", "app.cli", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, input=given, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, env: dict[str, str], *arguments: str) -> None:
        self._main, side = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "app.cli", *arguments],
            cwd=ROOT,
            env=env,
            stdin=side,
            stdout=side,
            stderr=side,
            start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # it controls the session
        )
        os.close(side)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._main, text.encode())

    def shows(self, text: str) -> None:
        """Wait until `text` is shown after what was waited for before."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.shown:
            assert time.monotonic() < deadline, f"no {text!r} in {self.shown!r}"
            self._read()
        self.shown = self.shown.partition(text)[2]

    def interrupt(self, shows: str) -> None:
        """Press Ctrl-C until `shows` is shown: input() misses a signal in the moment before it waits."""
        deadline = time.monotonic() + DEADLINE_S
        while shows not in self.shown:
            assert time.monotonic() < deadline, f"no {shows!r} in {self.shown!r}"
            self.type("\x03")
            again = time.monotonic() + 1
            while shows not in self.shown and time.monotonic() < again:
                self._read()
        self.shows(shows)

    def ended(self) -> int:
        status = self.process.wait(DEADLINE_S)
        while self._read():
            pass
        return status

    def _read(self) -> bool:
        if not select.select([self._main], [], [], 0.1)[0]:
            return False
        try:
            piece = os.read(self._main, 4096).decode()
        except OSError:  # the other side is closed
            return False
        self.shown += piece
        return bool(piece)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._main)


@pytest.fixture
def terminal() -> Iterator[type[Terminal]]:
    opened: list[Terminal] = []

    class Closed(Terminal):
        def __init__(self, env: dict[str, str], *arguments: str) -> None:
            super().__init__(env, *arguments)
            opened.append(self)

    yield Closed
    for each in opened:
        each.close()


def test_submit_now_and_read_later(env: dict[str, str], answering: Answering) -> None:
    status, printed, _ = run(env, "submit", "Hello")
    assert status == 0
    request_id = printed.strip()
    assert run(env, "result", request_id) == (0, f"{TEXT}\n", "")
    status, printed, _ = run(env, "result", "--json", request_id)
    assert (status, json.loads(printed)["text"]) == (0, TEXT)


def test_submit_waits_and_streams(env: dict[str, str], answering: Answering, tmp_path: Path) -> None:
    assert run(env, "submit", "--wait", "Hello") == (0, f"{TEXT}\n", "")
    assert run(env, "submit", "--stream", given="Hello") == (0, f"{TEXT}\n", "")
    prompt = tmp_path / "prompt"
    prompt.write_text("Hello")
    status, printed, _ = run(env, "submit", "--stream", "--json", "--file", str(prompt))
    events = [json.loads(line) for line in printed.splitlines()]
    assert ("".join(event["text"] for event in events), events[-1]["status"]) == (TEXT, "finished")
    status, printed, _ = run(env, "submit", "--wait", "--json", "-F", "n=2", "--max-tokens", "9", "Hello")
    assert (status, printed.count('"finished"')) == (0, 2)


def test_fields_reach_the_worker(env: dict[str, str], worker: ScriptedWorker) -> None:
    options = ("--raw", "--temperature", "0.5", "-F", "top_k=7", "-F", "stop=END")
    assert run(env, "submit", *options, "Hi")[0] == 0
    params = worker.claim().params
    assert (params.temperature, params.top_k, tuple(params.stop)) == (0.5, 7, ("END",))


def test_what_goes_wrong_has_a_status_and_no_traceback(env: dict[str, str], worker: ScriptedWorker) -> None:
    assert run(env, "submit")[0] == 2
    assert run(env, "submit", "-F", "nonsense", "Hi")[0] == 2
    status, _, said = run(env, "submit", "-F", "top_p=7", "Hi")
    assert (status, "top_p" in said) == (1, True)
    status, _, said = run(env, "result", "req-none")
    assert (status, "There is no request" in said) == (1, True)
    url = f"http://127.0.0.1:{free_port()}"
    for command in (("submit", "Hi"), ("status",), ("bench",), ("result", "req-1")):
        status, _, said = run(env, *command, "--url", url)
        assert status == 69
        assert said.startswith(f"kvrelay: {url} does not answer (Connection refused): start a gateway")
    status, _, said = run(env, "status", "--url", "localhost:8000")
    assert (status, "Invalid value for '--url'" in said) == (2, True)
    status, _, said = run(env, "statsu")
    assert (status, "Did you mean 'status'?" in said) == (2, True)
    assert run(env | {"PORT": "70000"}, "status")[0] == 78


def test_a_cancelled_request_fails_its_reader(
    env: dict[str, str], rooms: Rooms, worker: ScriptedWorker
) -> None:
    request_id = run(env, "submit", "Hello")[1].strip()
    status, _, said = run(env, "result", "--cancel", request_id)
    assert (status, said) == (1, "The request is cancelled.\n")
    record = rooms.record(request_id)
    assert record
    assert record.state is State.CANCELLED


def test_ctrl_c_cancels_what_is_waited_for(
    env: dict[str, str], rooms: Rooms, worker: ScriptedWorker, spoken: list[Token]
) -> None:
    command = [sys.executable, "-m", "app.cli", "submit", "--stream", "Hello"]
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE) as process:
        claimed = worker.claim()
        worker.emit(claimed, spoken[:1])
        assert process.stdout
        assert process.stdout.read(4) == b" one"
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 130
    record = rooms.record(claimed.hold.request_id)
    assert record
    assert record.state is State.CANCELLED


def test_a_closed_pipe_cancels_it_too(
    env: dict[str, str], rooms: Rooms, worker: ScriptedWorker, spoken: list[Token]
) -> None:
    command = [sys.executable, "-m", "app.cli", "submit", "--stream", "Hello"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe) as process:
        claimed = worker.claim()
        worker.emit(claimed, spoken[:1])
        assert process.stdout
        assert process.stderr
        assert process.stdout.read(4) == b" one"
        process.stdout.close()
        worker.emit(claimed, spoken[1:2])
        assert process.wait(DEADLINE_S) == 1
        assert process.stderr.read() == b""
    record = rooms.record(claimed.hold.request_id)
    assert record
    assert record.state is State.CANCELLED


def test_chat_on_a_terminal(
    env: dict[str, str],
    rooms: Rooms,
    worker: ScriptedWorker,
    spoken: list[Token],
    terminal: type[Terminal],
) -> None:
    screen = terminal(env, "chat")
    screen.shows("> ")
    screen.type("Hello\n")
    first = worker.claim()
    worker.emit(first, spoken[:1])
    screen.shows(" one")
    screen.type("\x03")
    screen.shows("> ")
    record = rooms.record(first.hold.request_id)
    assert record
    assert record.state is State.CANCELLED

    screen.type("nonsense")
    screen.shows("nonsense")
    screen.interrupt("> ")  # leaves the line that is being typed
    screen.type("Again\n")
    second = worker.claim()
    worker.emit(second, spoken, Finish("stop"))
    screen.shows(f"{TEXT}\r\n> ")
    assert len(second.prompt_ids) > len(first.prompt_ids), "what was said goes with it"
    screen.type("\x04")
    assert screen.ended() == 0


def test_chat_without_a_terminal(env: dict[str, str], answering: Answering) -> None:
    status, printed, said = run(env, "chat", given="Hello\n\n/new\nAgain\n")
    assert (status, printed, said) == (0, f"{TEXT}\n{TEXT}\n", "")
    first, second = (len(claimed.prompt_ids) for claimed in answering.claimed)
    assert abs(first - second) < 4, "what was said is forgotten"


def test_status_shows_the_pools(env: dict[str, str], worker: ScriptedWorker) -> None:
    status, printed, _ = run(env, "status")
    assert (status, ": ready\n" in printed, "unified  test  unified" in printed) == (0, True, True)
    status, printed, _ = run(env, "status", "--json")
    assert (status, json.loads(printed)["workers"][0]["pages"]["free"]) == (0, 256)
    worker.close()
    eventually(lambda: run(env, "status")[0] == 1, "it is missed")
    assert "no prefill worker, no decode worker" in run(env, "status")[1]


def test_status_watches_until_ctrl_c(
    env: dict[str, str], worker: ScriptedWorker, terminal: type[Terminal]
) -> None:
    screen = terminal(env, "status", "--watch")
    screen.shows("ready")
    screen.shows("ready")
    screen.type("\x03")
    assert screen.ended() == 0


@pytest.mark.parametrize(
    ("env_more", "arguments", "colored"),
    [
        ({}, (), True),
        ({"NO_COLOR": "1"}, (), False),
        ({"TERM": "dumb"}, (), False),
        ({}, ("--no-color",), False),
    ],
)
def test_color_is_for_terminals_that_want_it(
    env: dict[str, str],
    worker: ScriptedWorker,
    terminal: type[Terminal],
    env_more: dict[str, str],
    arguments: tuple[str, ...],
    colored: bool,
) -> None:
    screen = terminal(env | env_more, "status", *arguments)
    assert screen.ended() == 0
    assert ("\x1b[" in screen.shown) is colored
    assert "ready" in screen.shown


def test_a_closed_pipe_is_quiet(env: dict[str, str], worker: ScriptedWorker) -> None:
    command = f"{sys.executable} -m app.cli status --watch --json | head -1"
    done = subprocess.run(command, shell=True, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["object"] == "pools"
    assert done.stderr == ""


def test_bench_counts_what_it_sees(env: dict[str, str], answering: Answering, spoken: list[Token]) -> None:
    tokens = str(len(spoken))
    arguments = ("-c", "2", "-n", "4", "--input-tokens", "8", "--output-tokens", tokens, "--json")
    status, printed, said = run(env, "bench", *arguments)
    assert status == 0, said
    (row,) = json.loads(printed)
    assert (row["clients"], row["requests"]) == (2, 4)
    assert row["tokens_per_s"] == pytest.approx(4 * len(spoken) / row["seconds"])
    assert 0 < row["ttft_ms"] <= row["ttft_p99_ms"] < 1e3 * row["seconds"]
    assert [len(claimed.prompt_ids) for claimed in answering.claimed] == [8] * 5
    status, _, said = run(env, "bench", "-c", "1", "-n", "1", "--output-tokens", "64")
    assert (status, "counts" in said) == (1, True)


def test_bench_without_a_worker_says_what_the_gateway_says(env: dict[str, str]) -> None:
    status, printed, said = run(env, "bench", "-c", "1", "-n", "1")
    assert (status, printed) == (69, "")
    assert said.startswith("kvrelay: ")
    assert "{" not in said, "no JSON"
