"""Clusters that the tests of a module share; each test leaves its cluster idle and with all its workers."""

from collections.abc import Iterator

import pytest

from tests.chaos.cluster import Cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two prefill and two decode workers."""
    with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running
