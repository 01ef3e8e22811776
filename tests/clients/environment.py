"""A virtual environment for one client, made once and kept under build/clients."""

import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent


class InstallFailed(Exception):
    """The message holds the last lines of what pip said."""


def environment(name: str) -> Path:
    """The `bin` folder of the environment that `requirements/<name>.txt` asks for.

    `requirements/<name>.alone.txt`, where there is one, is installed without its dependencies: of a serving
    engine only the benchmark client is wanted. Raises InstallFailed.
    """
    folder = ROOT / "build" / "clients" / name
    files = [HERE / "requirements" / f"{name}.txt", HERE / "requirements" / f"{name}.alone.txt"]
    wanted = hashlib.sha256(b"".join(file.read_bytes() for file in files if file.exists())).hexdigest()
    stamp = folder / ".installed"
    if stamp.exists() and stamp.read_text() == wanted:
        return folder / "bin"
    _run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder))
    # By our own pip; and only what is imported gets compiled, when it is.
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    install = [*pip, "--python", str(folder / "bin" / "python"), "install", "-q", "--no-compile"]
    for file, more in zip(files, ([], ["--no-deps"])):
        if file.exists():
            _run(*install, *more, "-r", str(file))
    stamp.write_text(wanted)
    return folder / "bin"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise InstallFailed(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
