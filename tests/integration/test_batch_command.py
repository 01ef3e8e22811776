"""`kvrelay batch` as a user runs it: progress, results, an interruption and going on."""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.commands.api_client import ApiClient, Object
from app.commands.batch_command import BatchCommand
from relay.request import Finish
from relay.rooms import Rooms
from tests.batch_rig import ProcessorProcess, as_file, chat_lines, results
from tests.gateway_rig import Answering, GatewayProcess, ScriptedWorker, default_tokenizer, eventually, words
from tests.servers import RedisServer

MODEL = f"command-{secrets.token_hex(4)}"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def env(valkey: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Of the command, beside a gateway and a processor."""
    folder = tmp_path_factory.mktemp("command")
    env = {"REDIS_URL": valkey.url, "SERVED_NAME": MODEL, "FILES_URL": str(folder / "files")}
    with (
        GatewayProcess(valkey.url, MODEL, folder / "gateway", **env) as gateway,
        ProcessorProcess(folder / "processor", **env),
    ):
        yield os.environ | env | {"PORT": str(gateway.port)}


@pytest.fixture
def rooms(valkey: RedisServer) -> Iterator[Rooms]:
    client = Rooms(valkey.url, MODEL)
    yield client
    client.close()


@pytest.fixture
def answering(rooms: Rooms) -> Iterator[None]:
    spoken = words(default_tokenizer(), " yes")
    with ScriptedWorker(rooms) as worker, Answering(worker, spoken, Finish("stop")).running():
        yield


def start(env: dict[str, str], *arguments: str | Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "app.cli", "batch", *map(str, arguments)],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(env: dict[str, str], *arguments: str | Path) -> tuple[int, str, str]:
    process = start(env, *arguments)
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


def test_run_writes_answers_and_refusals(env: dict[str, str], answering: None, tmp_path: Path) -> None:
    requests = tmp_path / "night.jsonl"
    lines = list(chat_lines(5))
    lines[2]["body"]["top_p"] = 7
    requests.write_bytes(as_file(lines))
    status, _, said = run(env, "run", requests)
    assert status == 1, said
    assert "4 answered" in said
    answers = results((tmp_path / "night.output.jsonl").read_bytes())
    refusals = results((tmp_path / "night.output.errors.jsonl").read_bytes())
    assert (len(answers), list(refusals)) == (4, ["line-2"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "night.jsonl",
        "night.output.errors.jsonl",
        "night.output.jsonl",
    ]


def test_an_interrupted_run_goes_on(env: dict[str, str], rooms: Rooms, tmp_path: Path) -> None:
    requests, output = tmp_path / "night.jsonl", tmp_path / "answers.jsonl"
    requests.write_bytes(as_file(chat_lines(6)))
    process = start(env, "run", requests, "-o", output)
    eventually(lambda: b"batch_id" in note(output), "the batch is noted")
    batch_id = json.loads(note(output))["batch_id"]
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert batch_id in said
    status, listed, _ = run(env, "list")
    assert status == 0
    assert batch_id in listed.splitlines()[0]
    spoken = words(default_tokenizer(), " yes")
    with ScriptedWorker(rooms) as worker, Answering(worker, spoken, Finish("stop")).running() as answering:
        status, _, said = run(env, "run", requests, "-o", output)
        assert (status, batch_id in said) == (0, True), said
        assert len(answering.claimed) == 6, "the same batch, not another one"
    assert len(results(output.read_bytes())) == 6
    assert note(output) == b""


def note(output: Path) -> bytes:
    path = output.with_name(f"{output.name}.batch")
    return path.read_bytes() if path.exists() else b""


def test_what_is_wrong_is_told_with_its_line(env: dict[str, str], tmp_path: Path) -> None:
    requests = tmp_path / "night.jsonl"
    requests.write_bytes(as_file(chat_lines(1)) + b"{}\n")
    status, _, said = run(env, "run", requests)
    assert status == 1
    assert f"{requests}:2: custom_id must be a text." in said
    assert not note(tmp_path / "night.output.jsonl")
    requests.write_bytes(b"nonsense")
    status, _, said = run(env, "run", requests)
    assert (status, "its first line is no JSON" in said) == (1, True)
    requests.write_bytes(b"[]")
    status, _, said = run(env, "run", requests)
    assert (status, "its first line has no url" in said) == (1, True)


def test_a_list_of_none_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    class WithoutBatches(ApiClient):
        def get(self, path: str) -> Object:
            return {"data": [], "has_more": False}

    assert BatchCommand(WithoutBatches("", "")).list_all() == 0
    shown = capsys.readouterr()
    assert (shown.out, "There is no batch yet" in shown.err) == ("", True)


def test_cancel_and_status(env: dict[str, str], tmp_path: Path) -> None:
    requests = tmp_path / "night.jsonl"
    requests.write_bytes(as_file(chat_lines(3)))
    process = start(env, "run", requests)
    eventually(lambda: b"batch_id" in note(tmp_path / "night.output.jsonl"), "the batch is noted")
    batch_id = json.loads(note(tmp_path / "night.output.jsonl"))["batch_id"]
    assert run(env, "cancel", batch_id)[0] == 0
    _, said = process.communicate(timeout=30)
    assert (process.returncode, "The batch is cancelled." in said) == (1, True)
    status, shown, _ = run(env, "status", batch_id)
    assert (status, json.loads(shown)["status"]) == (0, "cancelled")
    status, _, said = run(env, "status", "batch_0")
    assert (status, "There is no batch" in said) == (1, True)
