"""Three hosts: Redis and the gateway's in front, one that prefills, one that decodes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.network import Network, unable
from tests.hosts.stage import Stage


@pytest.fixture(scope="session")
def network() -> Iterator[Network]:
    if why := unable():
        pytest.skip(f"several hosts on one machine: {why}")
    with Network() as network:
        yield network


@pytest.fixture(scope="module")
def stage(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder: Path = tmp_path_factory.mktemp("hosts")
    with Stage(network, folder) as stage:
        yield stage
