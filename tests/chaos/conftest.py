"""The cluster that most tests here share, its load, and the undisturbed texts of that load."""

from collections.abc import Iterator

import pytest

from tests.chaos.cluster import Cluster
from tests.chaos.load import Prompt, prompts, undisturbed
from tests.chaos.watch import Text


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two prefill and two decode workers: starting them takes longer than most tests."""
    with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="session")
def load() -> list[Prompt]:
    return prompts(seed=1)


@pytest.fixture(scope="session")
def expected(shared_cluster: Cluster, load: list[Prompt]) -> list[Text]:
    return undisturbed(shared_cluster, load)


@pytest.fixture
def cluster(shared_cluster: Cluster, expected: list[Text]) -> Iterator[Cluster]:
    """Whole when a test gets it, whatever the one before did."""
    shared_cluster.ready()
    shared_cluster.forget()
    yield shared_cluster
    shared_cluster.disarm()
    shared_cluster.resume_all()
