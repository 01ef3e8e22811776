"""What a client says of its own run, and where it runs."""

import subprocess
from pathlib import Path
from typing import NamedTuple


class Report(NamedTuple):
    """Requests that a client counts as answered, and the tokens it counts or was told of (-1: neither)."""

    requests: int
    prompt_tokens: int
    output_tokens: int


class Site(NamedTuple):
    """`bin` of the client's environment, the server, the model's folder, and where the client may write."""

    bin: Path
    url: str
    model: str
    model_folder: Path
    out: Path

    def run(self, *command: str | Path, timeout_s: float = 300) -> str:
        """What the command printed. Raises AssertionError when it fails."""
        done = subprocess.run(
            [self.bin / command[0], *command[1:]],
            cwd=self.out,
            env={"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(self.out), "OPENAI_API_KEY": "none"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, f"{command[0]} ended with {done.returncode}:\n{done.stdout[-4000:]}"
        return done.stdout
