"""Every command has help, and a line in docs/cli.md."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from app.cli import COMMANDS, cli

DOC = Path(__file__).parents[2] / "docs" / "cli.md"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_explained(command: str) -> None:
    shown = CliRunner().invoke(cli, [command, "--help"])
    assert shown.exit_code == 0
    assert f"Usage: cli {command}" in shown.output
    assert f"`kvrelay {command}`" in DOC.read_text()


def test_what_is_typed_often_starts_without_torch_and_celery() -> None:
    commands = ", ".join(f"app.commands.{name}" for name in COMMANDS)
    script = f"import sys, app.cli, {commands}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not {"torch", "celery", "numpy", "flask", "pydantic", "tokenizers"} & set(done.stdout.split())
