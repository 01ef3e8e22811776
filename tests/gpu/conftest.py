"""Tests that need an NVIDIA GPU; without one they are skipped."""

from collections.abc import Generator

import pytest
import torch

from kernels.base import NotCompiled


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="torch sees no GPU")
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Under FLASHINFER_DISABLE_JIT a module that was not compiled ahead is none that a test could judge."""
    try:
        return (yield)
    except NotCompiled as error:
        pytest.skip(str(error))
