"""What must be true before anything starts; each check says what to change when it is not."""

import os
import shutil
import socket
from pathlib import Path

from redis.exceptions import RedisError

from app.launch.address import netloc
from relay.redis_client import probe_client
from relay.redis_url import RedisUrl

NEEDED_MB = 200  # logs, and the append-only file of Valkey with its rewrite


class CheckFailed(Exception):
    """This machine or its settings cannot run kvrelay as asked; the message says what to do."""


def check_port(host: str, port: int, variable: str) -> None:
    """Raises CheckFailed when `host`:`port` cannot be listened on; `variable` is the setting to change."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen()
    except OSError as error:
        raise CheckFailed(
            f"Cannot listen on {netloc(host, port)} ({error.strerror}): stop what uses the port,"
            f" or choose another one, as in {variable}={port + 1 if port < 65_535 else 8000}."
        ) from error


def check_folder(path: Path, needed_mb: int = NEEDED_MB) -> None:
    """Create `path`. Raises CheckFailed when it cannot be written or its disk is full."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".probe"
        probe.write_bytes(b"\0" * 4096)
        probe.unlink()
    except OSError as error:
        raise CheckFailed(
            f"Cannot write to {path.absolute()} ({error.strerror}): mend that, or set VAR_DIR to another one."
        ) from error
    free_mb = shutil.disk_usage(path).free >> 20
    if free_mb < needed_mb:
        raise CheckFailed(
            f"{path.absolute()} has {free_mb} MB left and about {needed_mb} MB are needed:"
            " free some space, or set VAR_DIR to a folder on another disk."
        )


def check_redis(url: str, variable: str = "REDIS_URL") -> None:
    """Raises CheckFailed when no server answers at `url`, or it is too old for functions."""
    shown = f"{variable}={RedisUrl.parse(url)}"
    try:
        with probe_client(url, timeout_s=5.0) as client:
            version = client.info("server")["redis_version"]
    except (RedisError, OSError) as error:
        raise CheckFailed(
            f"{shown} does not answer ({error}): start that server, correct {variable},"
            f" or unset {variable} to have one started."
        ) from error
    if int(str(version).split(".")[0]) < 7:
        raise CheckFailed(f"The server at {shown} is Redis {version}: use Redis 7 or Valkey.")


def parse_cores(text: str) -> tuple[int, ...]:
    """The cores that CORES names: `0-3,6` is 0, 1, 2, 3, 6; empty is all that may be used; `none` is none.

    Raises CheckFailed for anything else, and for cores that may not be used.
    """
    usable = os.sched_getaffinity(0)
    if text == "none":
        return ()
    if not text:
        return tuple(sorted(usable))
    cores: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            cores += range(int(first), int(last if dash else first) + 1)
        if not cores:
            raise ValueError
    except ValueError:
        raise CheckFailed(f"CORES={text!r} is no list of cores: write it as 0-3,6, or none.") from None
    if missing := sorted(set(cores) - usable):
        raise CheckFailed(f"CORES={text!r} names {missing}, which are not among the usable {sorted(usable)}.")
    return tuple(cores)


def share_cores(cores: tuple[int, ...], workers: int) -> list[frozenset[int] | None]:
    """Cores for each worker, equal shares of neighbours; all None when there are fewer cores than workers."""
    if len(cores) < workers:
        return [None] * workers
    share, more = divmod(len(cores), workers)
    shares: list[frozenset[int] | None] = []
    for i in range(workers):
        size = share + (i < more)
        shares.append(frozenset(cores[:size]))
        cores = cores[size:]
    return shares
