"""Tests that need an NVIDIA GPU; without one they are skipped."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="torch sees no GPU")
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(skip)
