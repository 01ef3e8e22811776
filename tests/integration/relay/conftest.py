"""Workers for each file: a prefill and a decode worker, and a unified one of another name.

A file may ask for the TINY model instead of the default one, and for APPEND_FSYNC of its server.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.processes import until
from tests.relay_rig import Relay, tiny_model
from tests.servers import RedisServer, valkey_binary

Make = Callable[..., Relay]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=1024)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    append_fsync = getattr(request.module, "APPEND_FSYNC", None)
    with RedisServer(
        valkey_binary(), tmp_path_factory.mktemp("valkey"), append_fsync=append_fsync
    ) as running:
        yield running


@pytest.fixture(scope="module")
def make(
    request: pytest.FixtureRequest, server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Make]:
    made: list[Relay] = []
    folder = tmp_path_factory.mktemp("relay")
    model_env = (
        {"MODEL": str(request.getfixturevalue("tiny"))} if getattr(request.module, "TINY", False) else {}
    )

    def make(model: str, *roles: str, **env: str) -> Relay:
        made.append(Relay(server, folder, model, **model_env | env))
        made[-1].start(*roles)
        return made[-1]

    yield make
    for relay in made:
        relay.close()


@pytest.fixture(scope="module")
def systems(make: Make) -> tuple[Relay, Relay]:
    pair, alone = make("relayed", "prefill", "decode"), make("alone", "unified")
    pair.ready()
    alone.ready()
    return pair, alone


@pytest.fixture(scope="module")
def pair(systems: tuple[Relay, Relay]) -> Relay:
    return systems[0]


@pytest.fixture(scope="module")
def alone(systems: tuple[Relay, Relay]) -> Relay:
    return systems[1]


@pytest.fixture(autouse=True)
def _idle_after(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did, no page and no task is left."""
    yield
    for name in {"pair", "alone"} & set(request.fixturenames):
        relay: Relay = request.getfixturevalue(name)
        until(relay.free, "every page is free or cached")
        assert relay.tasks() == set()
