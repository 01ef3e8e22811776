"""What clients cost the gateway: bodies that are too large or never complete, and memory that stays."""

import http.client
import json
import secrets
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.gateway_rig import GatewayProcess
from tests.servers import RedisServer

CLIENTS = 16
LONG = {"prompt": "a " * 40_000}  # beyond the context, which only its tokens show
MOST_GROWTH_MB = 160  # with an arena per thread it is about 300


@pytest.fixture(scope="module")
def gateway(valkey: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    log = tmp_path_factory.mktemp("gateway") / "log"
    with GatewayProcess(valkey.url, f"memory-{secrets.token_hex(4)}", log) as process:
        yield process


def test_a_connection_outlives_a_body_that_is_too_large(gateway: GatewayProcess) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
    connection.request("POST", "/v1/requests", b"x" * 8_000_000, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    assert (reply.status, b"4194304 bytes" in reply.read()) == (413, True)
    first_socket = connection.sock
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    assert connection.sock is first_socket
    connection.close()


@pytest.mark.parametrize("path", ["/v1/requests", "/v1/files"])
def test_a_body_that_is_said_to_be_huge_and_never_comes(gateway: GatewayProcess, path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999\r\n"
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as client:
        client.sendall(f"{head}Content-Type: multipart/form-data; boundary=x\r\n\r\n{{".encode())
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1000).startswith(b"HTTP/1.1 413")


def test_long_prompts_do_not_stay_in_memory(gateway: GatewayProcess) -> None:
    before = resident_mb(gateway)
    with ThreadPoolExecutor(CLIENTS) as pool:
        replies = list(pool.map(lambda _: gateway.call("POST", "/v1/requests", LONG), range(4 * CLIENTS)))
    assert {reply.status for reply in replies} == {400}
    assert resident_mb(gateway) - before < MOST_GROWTH_MB


def test_stalled_clients_do_not_keep_the_threads(
    valkey: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    head = b"POST /v1/requests HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n"
    log = tmp_path_factory.mktemp("stalled") / "log"
    with GatewayProcess(valkey.url, "stalled", log, GATEWAY_THREADS="4") as gateway, ExitStack() as stack:
        address = ("127.0.0.1", gateway.port)
        stalled = [stack.enter_context(socket.create_connection(address, timeout=30)) for _ in range(4)]
        for each, sent in zip(stalled, (head, head, head + b"\r\n{", head + b"\r\n{"), strict=True):
            each.sendall(sent)
        assert gateway.call("GET", "/health").status == 200
        assert all(b"request_timeout" in each.recv(1000) for each in stalled[2:])


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /" + b"a" * 5_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 200 + b"\r\n", 431),
        (b"GET / HTTP/7.1\r\nHost: a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno header\r\n\r\n", 400),
        (b"POST /v1/requests HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /v1/requests HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST /v1/requests HTTP/1.1\r\nTransfer-Encoding: br\r\n\r\n", 501),
    ],
)
def test_what_is_no_http_is_refused_in_the_one_form(
    gateway: GatewayProcess, sent: bytes, status: int
) -> None:
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        reply = http.client.HTTPResponse(client)
        reply.begin()
        error = json.loads(reply.read())["error"]
    assert (reply.status, error["type"], error["param"]) == (
        status,
        "server_error" if status > 500 else "invalid_request_error",
        None,
    )


def test_clients_that_do_not_close_make_nobody_wait(gateway: GatewayProcess) -> None:
    address = ("127.0.0.1", gateway.port)
    with ExitStack() as stack:
        # Waiting for one after the other would take longer than a call may.
        clients = [stack.enter_context(socket.create_connection(address, timeout=30)) for _ in range(20)]
        for client in clients:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert all(client.recv(1000).startswith(b"HTTP/1.1 200") for client in clients)
        assert gateway.call("GET", "/health").status == 200


def resident_mb(gateway: GatewayProcess) -> float:
    status = Path(f"/proc/{gateway.worker_process_id}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1000
