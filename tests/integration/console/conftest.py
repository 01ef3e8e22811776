"""One browser for all files, and a gateway and a Valkey for each."""

import os
import secrets
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from relay.rooms import Rooms
from tests.browser_rig import chromium, chromium_binary, watched_page
from tests.gateway_rig import GatewayProcess, ScriptedWorker, cancel_all
from tests.servers import RedisServer, valkey_binary


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    binary = chromium_binary()
    if binary is None and os.environ.get("CI"):
        pytest.fail("chromium is missing, and CI must test the console page: run tests/setup.sh")
    if binary is None:
        pytest.skip("chromium is not installed: run tests/setup.sh to test the console page")
    with chromium(binary) as browser:
        yield browser


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with watched_page(browser) as page:
        yield page


@pytest.fixture(scope="module")
def model() -> str:
    return f"console-{secrets.token_hex(4)}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Of this file alone: a test takes it away."""
    with RedisServer(valkey_binary(), tmp_path_factory.mktemp("valkey"), "always") as server:
        yield server


@pytest.fixture(scope="module")
def gateway(
    request: pytest.FixtureRequest, server: RedisServer, model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    settings = getattr(request.module, "GATEWAY", {})
    with GatewayProcess(server.url, model, tmp_path_factory.mktemp("gateway") / "log", **settings) as process:
        yield process


@pytest.fixture
def rooms(server: RedisServer, model: str) -> Iterator[Rooms]:
    rooms = Rooms(server.url, model)
    yield rooms
    cancel_all(rooms)
    rooms.close()


@pytest.fixture
def worker(rooms: Rooms) -> Iterator[ScriptedWorker]:
    with ScriptedWorker(rooms) as worker:
        yield worker
