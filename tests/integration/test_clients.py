"""The light part of `make clients`: clients that others wrote, unmodified, against the whole of kvrelay."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.environment import InstallFailed, environment

LIMIT_S = 240  # for starting, and for a model in float32 on a busy machine


def test_the_sdk_and_a_command_line() -> None:
    """Exit 0, no failed request, and the tokens that they were told of are those that the server counts."""
    try:
        environment("llm")
    except InstallFailed as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(f"llm cannot be installed here: {error}")
    ours = {"OPENAI_BIN": str(Path(sys.executable).parent)}  # the SDK is installed for tests anyhow
    done = subprocess.run(
        [sys.executable, "-m", "tests.clients", "openai", "llm"],
        env=os.environ | ours,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(" passed: ") == 2, done.stdout
