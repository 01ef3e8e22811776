"""/v1/files, as the `openai` client and raw HTTP meet it, over a folder and over a bucket."""

import os
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from relay.request import Finish
from relay.rooms import Rooms
from tests.batch_rig import ProcessorProcess, as_file, chat_lines, results
from tests.bucket import bucket
from tests.gateway_rig import Answering, GatewayProcess, ScriptedWorker, default_tokenizer, eventually, words
from tests.servers import RedisServer

MODEL = f"files-{secrets.token_hex(4)}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def gateway(valkey: RedisServer, folder: Path) -> Iterator[GatewayProcess]:
    with GatewayProcess(
        valkey.url, MODEL, folder / "log", FILES_URL=str(folder / "files"), MAX_FILE_BYTES=str(40 << 20)
    ) as process:
        yield process


def client_of(gateway: GatewayProcess, **how: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=30, **how)


def check_life(client: openai.OpenAI) -> None:
    content = secrets.token_bytes(20 << 20)
    file = client.files.create(file=("input.jsonl", content), purpose="batch")
    assert file.id.startswith("file-")
    assert (file.bytes, file.filename, file.purpose) == (len(content), "input.jsonl", "batch")
    assert client.files.content(file.id).read() == content
    assert client.files.retrieve(file.id) == file
    assert [each.id for each in client.files.list()] == [file.id]
    assert client.files.delete(file.id).deleted
    assert list(client.files.list()) == []
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)


def test_a_file_in_a_folder(gateway: GatewayProcess, folder: Path) -> None:
    check_life(client_of(gateway))
    assert not any(path.is_file() for path in (folder / "files").rglob("*"))


def test_a_file_and_a_batch_in_a_bucket(valkey: RedisServer, tmp_path: Path) -> None:
    model = f"bucket-{secrets.token_hex(4)}"
    spoken = words(default_tokenizer(), " yes")
    with bucket() as env, GatewayProcess(valkey.url, model, tmp_path / "log", **env) as gateway:
        client = client_of(gateway)
        check_life(client)
        file = client.files.create(file=("x", as_file(chat_lines(5))), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        rooms = Rooms(valkey.url, model)
        own = {"REDIS_URL": valkey.url, "SERVED_NAME": model}
        with (
            ProcessorProcess(tmp_path / "processor", **env, **own),
            ScriptedWorker(rooms) as worker,
            Answering(worker, spoken, Finish("stop")).running(),
        ):
            eventually(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch ends")
        rooms.close()
        output = client.batches.retrieve(batch.id).output_file_id or ""
        assert len(results(client.files.content(output).read())) == 5


def test_a_list_has_pages_and_purposes(gateway: GatewayProcess) -> None:
    client = client_of(gateway)
    files = [client.files.create(file=(f"{i}", b"x"), purpose="batch") for i in range(3)]
    other: Any = client.files.create(file=("other", b"x"), purpose="user_data")
    newest_first = [each.id for each in client.files.list(purpose="batch", limit=2)]
    assert sorted(newest_first) == sorted(each.id for each in files)
    page = client.files.list(limit=1, order="asc")
    assert (len(page.data), page.has_more) == (1, True)
    assert [each.id for each in client.files.list(purpose="user_data")] == [other.id]
    for each in (*files, other):
        client.files.delete(each.id)


def test_what_is_refused(gateway: GatewayProcess) -> None:
    client = client_of(gateway)
    wrong: Any = "none"
    with pytest.raises(openai.BadRequestError, match="purpose must be one of"):
        client.files.create(file=("a", b"x"), purpose=wrong)
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        client.files.create(
            file=("a", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 1}
        )
    for seconds in ("²", "9" * 5000, "-1", "x", ""):  # the first is a digit to Python, and no number
        wrong = {"anchor": "created_at", "seconds": seconds}
        with pytest.raises(openai.BadRequestError, match="expires_after"):
            client.files.create(file=("a", b"x"), purpose="batch", expires_after=wrong)
    with pytest.raises(openai.APIStatusError) as caught:
        client.files.create(file=("a", b"x" * ((40 << 20) + 1)), purpose="batch")
    assert caught.value.status_code == 413
    assert gateway.call("POST", "/v1/files", {"purpose": "batch"}).status == 400
    text: Any = '{"anchor": "created_at", "seconds": 3600}'
    with pytest.raises(openai.BadRequestError, match=r"expires_after\[anchor\]"):
        client.files.create(file=("a", b"x"), purpose="batch", expires_after=text)
    for seconds in ("\u00b2", "9" * 5_000, "-3600", "3600.5"):
        expiry: Any = {"anchor": "created_at", "seconds": seconds}
        with pytest.raises(openai.BadRequestError, match="expires_after"):
            client.files.create(file=("a", b"x"), purpose="batch", expires_after=expiry)
    for unknown in ("file-" + "0" * 32, "file-..", "x"):
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(unknown)
    assert list(client.files.list()) == []


def test_a_file_that_expires(gateway: GatewayProcess) -> None:
    client = client_of(gateway)
    file = client.files.create(
        file=("a", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert file.expires_at == file.created_at + 3600
    client.files.delete(file.id)


def test_an_upload_that_stops_leaves_nothing(gateway: GatewayProcess, folder: Path) -> None:
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    request = b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    with socket.create_connection(("127.0.0.1", gateway.port)) as connection:
        connection.sendall(request + b"Content-Length: 1000000\r\n\r\n" + head + b"y" * 600_000)
    assert list(client_of(gateway).files.list()) == []
    assert not any(path.is_file() for path in (folder / "files").rglob("*"))


def test_the_gateway_is_killed_in_an_upload(valkey: RedisServer, tmp_path: Path) -> None:
    """While its bytes go to the storage: nobody sees a part of them, then or later."""
    model, files = f"killed-{secrets.token_hex(4)}", tmp_path / "files"
    with GatewayProcess(valkey.url, model, tmp_path / "log", FILES_URL=str(files)) as gateway:
        stuck = files / "files"
        stuck.mkdir(parents=True)
        pid = gateway.worker_process_id
        head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        form = b'\r\n--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n'
        body = head + b"y" * (100 << 20) + form
        request = b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=x\r\n"
        connection = socket.create_connection(("127.0.0.1", gateway.port))
        connection.sendall(request + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        eventually(lambda: any(stuck.iterdir()), "the file is being written")
        os.kill(pid, signal.SIGKILL)
        connection.close()
        eventually(lambda: _answers(gateway), "another process serves")
        assert list(client_of(gateway).files.list()) == []
    shutil.rmtree(files)


def _answers(gateway: GatewayProcess) -> bool:
    try:
        return gateway.call("GET", "/health").status == 200
    except OSError:
        time.sleep(0.05)
        return False
