"""Fixtures that all tests share: real servers, and model names that nobody else uses."""

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relay.rooms import Rooms
from tests.servers import RedisServer, redis_binary, valkey_binary

pytest.register_assert_rewrite("tests.kernel_contract")

# A shell that runs the tests in the background has it ignored, and so would every process that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

_models = itertools.count(1)


def _redis_binary() -> Path:
    binary = redis_binary()
    if binary:
        return binary
    if os.environ.get("CI"):
        pytest.fail("redis-server is missing, and CI must test on it: run tests/setup.sh")
    pytest.skip("redis-server is not installed: run tests/setup.sh to test on it too")


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(valkey_binary(), tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="session")
def redis7(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(_redis_binary(), tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["valkey", "redis7"])
def server(request: pytest.FixtureRequest) -> RedisServer:
    """A test that takes this runs on both. The server is shared, so it neither flushes nor restarts it."""
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


@pytest.fixture(params=["valkey", "redis7"])
def server_binary(request: pytest.FixtureRequest) -> Path:
    """For tests that need a server of their own."""
    return valkey_binary() if request.param == "valkey" else _redis_binary()


@pytest.fixture
def model() -> str:
    """A model name of this test's own: its keys meet nobody else's."""
    return f"model-{next(_models)}"


@pytest.fixture
def rooms(server: RedisServer, model: str) -> Iterator[Rooms]:
    client = Rooms(server.url, model)
    yield client
    redis: Any = client.redis
    # Who scans looks at the keys of all tests: those of a thousand would cost more than the test.
    if keys := list(redis.scan_iter(f"{client.root}:*", count=10_000)):
        redis.unlink(*keys)
    client.close()
