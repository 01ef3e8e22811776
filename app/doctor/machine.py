"""This machine: folders, ports, limits, memory."""

import os
import resource
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

from app.doctor.finding import Finding, fail, ok, warn
from app.gateway.keys import KeyRing
from app.launch import programs
from app.launch.address import base_url, netloc
from app.launch.checks import CheckFailed, check_folder, check_port, parse_cores
from relay.settings import Settings

_LEAST_FILES = 4_096  # a gateway has one for each stream, NIXL more than a hundred
_LEAST_SHM_MB = 256
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_RDMA = Path("/sys/class/infiniband")


def check_folders(settings: Settings) -> Iterator[Finding]:
    folder = Path(settings.var_dir)
    was_there = folder.exists()
    try:
        check_folder(folder)
    except CheckFailed as error:
        what, _, todo = str(error).partition(": ")
        yield fail("folder", what, todo)
    else:
        yield ok("folder", f"{folder.absolute()} can be written, and has space")
        if not was_there:
            folder.rmdir()


def check_ports(settings: Settings) -> Iterator[Finding]:
    ours = {
        "PORT": (settings.port, "/openapi.json", b"kvrelay"),
        "FLOWER_PORT": (settings.flower_port, "/", b"Flower"),
    }
    for variable, (port, path, word) in ours.items():
        where = netloc(settings.host, port)
        try:
            check_port(settings.host, port, variable)
        except CheckFailed as error:
            if _says(settings.host, port, path, word):
                yield ok(variable, f"{where} is taken by what belongs there: it runs already")
            else:
                what, _, todo = str(error).partition(": ")
                yield fail(variable, what, todo)
        else:
            yield ok(variable, f"{where} is free")


def check_access(settings: Settings) -> Iterator[Finding]:
    """Who may call, where others can reach it."""
    try:
        programs.flower_env(settings.host)
        everybody = KeyRing.from_settings(settings).caller(None) is not None
    except (PermissionError, ValueError) as error:
        what, _, todo = str(error).partition(": ")
        yield fail("access", what, todo or "see docs/security.md")
        return
    if everybody and not programs.is_loopback(settings.host):
        todo = "set API_KEY or API_KEYS_FILE: docs/security.md"
        yield warn("access", f"whoever reaches {netloc(settings.host, settings.port)} may call", todo)
    else:
        yield ok("access", "on this machine only" if everybody else "with keys")


def check_limits(_: Settings) -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files < _LEAST_FILES:
        yield warn("open files", f"{files} at most", f"ulimit -n {_LEAST_FILES}, or LimitNOFILE of the unit")
    else:
        yield ok("open files", f"{files} at most")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shown = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked >> 20} MiB at most"
    if locked != resource.RLIM_INFINITY and _RDMA.is_dir() and any(_RDMA.iterdir()):
        todo = "ulimit -l unlimited, or LimitMEMLOCK=infinity: RDMA locks the whole KV pool"
        yield warn("locked memory", shown, todo)
    else:
        yield ok("locked memory", f"{shown}; only RDMA needs more")


def check_shared_memory(_: Settings) -> Iterator[Finding]:
    found = os.statvfs("/dev/shm")
    size_mb = found.f_frsize * found.f_blocks >> 20
    if size_mb < _LEAST_SHM_MB:
        todo = f"give the container more: shm_size: {_LEAST_SHM_MB}m, or --ipc=host"
        yield warn("shared memory", f"/dev/shm has {size_mb} MiB", todo)
    else:
        yield ok("shared memory", f"/dev/shm has {size_mb} MiB")


def check_huge_pages(_: Settings) -> Iterator[Finding]:
    try:
        text = _HUGE_PAGES.read_text()
    except OSError:
        text = "[never]"
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen == "never":
        todo = f"echo madvise > {_HUGE_PAGES}: weights and KV are then read with fewer misses"
        yield warn("huge pages", "transparent huge pages are off", todo)
    else:
        yield ok("huge pages", chosen)


def check_cores(settings: Settings) -> Iterator[Finding]:
    workers = settings.prefill_workers + settings.decode_workers + settings.unified_workers
    try:
        cores = parse_cores(settings.cores) or tuple(os.sched_getaffinity(0))
    except CheckFailed as error:
        yield fail("cores", str(error), "see docs/settings.md")
        return
    if len(cores) < workers and settings.device != "cuda":
        yield warn(
            "cores", f"{len(cores)} for {workers} workers", "start fewer workers, or UNIFIED_WORKERS=1 alone"
        )
    else:
        yield ok("cores", f"{len(cores)} for {workers} workers")


def _says(host: str, port: int, path: str, word: bytes) -> bool:
    """Whether what listens there names itself so, be it in a refusal."""
    try:
        with urllib.request.urlopen(f"{base_url(host, port)}{path}", timeout=3) as answer:
            return word in answer.read(65_536)
    except urllib.error.HTTPError as error:
        return word in error.read(65_536)
    except (OSError, HTTPException):
        return False
