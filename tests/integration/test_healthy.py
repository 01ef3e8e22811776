"""`kvrelay healthy` beside real servers, and which registered worker it takes for this container's."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from app.launch.health import worker_here
from relay.rooms import Rooms
from relay.settings import Settings
from relay.worker_card import Incarnation, WorkerCard, host_identity
from tests.gateway_rig import GatewayProcess
from tests.integration.scene import card
from tests.servers import RedisServer, free_port

HOSTNAME = socket.gethostname()


def here(boot: str, incarnation: Incarnation | None = None, hostname: str = HOSTNAME) -> WorkerCard:
    return card(boot)._replace(incarnation=incarnation or Incarnation.here(boot), name=f"decode@{hostname}")


def healthy(part: str, **env: str | int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app.cli", "healthy", part],
        env=os.environ | {name: str(value) for name, value in env.items()},
        capture_output=True,
        text=True,
    )


def test_a_worker_is_healthy_while_it_is_registered(server: RedisServer) -> None:
    rooms = Rooms(server.url, Settings.from_env({}).model_name)
    assert healthy("worker", REDIS_URL=server.url).returncode == 1
    rooms.register(here("healthy-one"))
    found = healthy("worker", REDIS_URL=server.url)
    assert (found.returncode, found.stderr) == (0, "")
    assert f"decode@{HOSTNAME} is registered" in found.stdout
    rooms.deregister("healthy-one")
    assert healthy("worker", REDIS_URL=server.url).returncode == 1
    rooms.close()


def test_a_worker_is_not_blamed_for_redis() -> None:
    found = healthy("worker", REDIS_URL=f"redis://127.0.0.1:{free_port()}")
    assert found.returncode == 0
    assert "Redis is away" in found.stdout


def test_another_program_at_that_port_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            with contextlib.suppress(OSError):  # when the test is over
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")

        threading.Thread(target=refuse, daemon=True).start()
        found = healthy("worker", REDIS_URL=f"redis://127.0.0.1:{listener.getsockname()[1]}")
    assert found.returncode == 1
    assert "no Redis" in found.stdout


@pytest.mark.parametrize("part", ["redis", "gateway", "flower"])
def test_what_does_not_answer_is_not_healthy(part: str) -> None:
    port = free_port()
    found = healthy(part, REDIS_URL=f"redis://127.0.0.1:{port}", PORT=port, FLOWER_PORT=port)
    assert found.returncode == 1
    assert "not answer" in found.stdout


def test_a_redis_that_answers_is_healthy(server: RedisServer) -> None:
    assert healthy("redis", REDIS_URL=server.url).returncode == 0


def test_the_worker_of_another_container_or_life_is_not_this_one() -> None:
    mine = Incarnation.here("mine")
    elsewhere = here("elsewhere", mine._replace(host="another kernel/pid:[1]"))
    neighbour = here("neighbour", hostname="neighbour")  # where containers share a pid namespace
    before = here("before", mine._replace(start_ticks=mine.start_ticks - 1))
    others = [elsewhere, neighbour, before]
    assert worker_here(others, host_identity(), HOSTNAME) is None
    assert worker_here([*others, here("mine", mine)], host_identity(), HOSTNAME) == here("mine", mine)


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::1", "::"])
def test_a_gateway_may_listen_on_ipv6(server: RedisServer, tmp_path: Path, host: str) -> None:
    with GatewayProcess(server.url, "six", tmp_path / "log", address="::1", HOST=host) as gateway:
        found = healthy("gateway", HOST=host, PORT=gateway.port)
    assert "decode worker" in found.stdout, "it says what is missing"
