"""/v1/files, as the `openai` client and raw HTTP meet it, over a folder and over a bucket."""

import http.client
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.gateway_rig import GatewayProcess, eventually
from tests.servers import RedisServer, free_port

MODEL = f"files-{secrets.token_hex(4)}"
KEYS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def gateway(valkey: RedisServer, folder: Path) -> Iterator[GatewayProcess]:
    with GatewayProcess(
        valkey.url, MODEL, folder / "log", FILES_URL=str(folder / "files"), MAX_FILE_BYTES=str(40 << 20)
    ) as process:
        yield process


@pytest.fixture(scope="module")
def bucket() -> Iterator[dict[str, str]]:
    """A server that speaks S3, with one bucket; the environment to find it."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually(lambda: _created(port), "the S3 server answers")
        yield {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "FILES_URL": "s3://bucket/kvrelay"}
    finally:
        server.kill()
        server.wait()


def _created(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("PUT", "/bucket")
        return connection.getresponse().status == 200
    except OSError:
        return False


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


def test_a_file_in_a_bucket(valkey: RedisServer, bucket: dict[str, str], tmp_path: Path) -> None:
    model = f"bucket-{secrets.token_hex(4)}"
    with GatewayProcess(valkey.url, model, tmp_path / "log", **bucket) as gateway:
        check_life(client_of(gateway))


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
    with pytest.raises(openai.APIStatusError) as caught:
        client.files.create(file=("a", b"x" * ((40 << 20) + 1)), purpose="batch")
    assert caught.value.status_code == 413
    assert gateway.call("POST", "/v1/files", {"purpose": "batch"}).status == 400
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
