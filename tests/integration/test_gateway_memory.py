"""What bodies cost the gateway: the connection of one that is too large, and memory that stays."""

import http.client
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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


def test_long_prompts_do_not_stay_in_memory(gateway: GatewayProcess) -> None:
    before = resident_mb(gateway)
    with ThreadPoolExecutor(CLIENTS) as pool:
        replies = list(pool.map(lambda _: gateway.call("POST", "/v1/requests", LONG), range(4 * CLIENTS)))
    assert {reply.status for reply in replies} == {400}
    assert resident_mb(gateway) - before < MOST_GROWTH_MB


def resident_mb(gateway: GatewayProcess) -> float:
    status = Path(f"/proc/{gateway.worker_process_id}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1000
