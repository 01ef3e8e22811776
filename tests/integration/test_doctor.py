"""`kvrelay doctor` on real servers, a real NIXL, and settings that are wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gateway_rig import ROOT
from tests.servers import RedisServer, free_port, valkey_binary


def doctor(tmp_path: Path, **env: str) -> tuple[int, dict[str, str]]:
    """Its exit status, and the level of each subject."""
    ports = {"PORT": str(free_port()), "FLOWER_PORT": str(free_port()), "VAR_DIR": str(tmp_path / "var")}
    done = subprocess.run(
        [sys.executable, "-m", "app.cli", "doctor", "--json"],
        cwd=ROOT,
        env=os.environ | ports | env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    return done.returncode, {each["subject"]: each["level"] for each in json.loads(done.stdout)}


def test_a_machine_that_is_well(tmp_path: Path) -> None:
    with RedisServer(valkey_binary(), tmp_path, "everysec", ["--maxmemory", "1gb"]) as server:
        status, levels = doctor(tmp_path, REDIS_URL=server.url, BROKER_URL=server.url)
    well = (
        "settings",
        "model",
        "redis",
        "eviction",
        "durability",
        "clock",
        "broker",
        "engine",
        "NIXL",
        "PORT",
    )
    assert {levels[subject] for subject in well} == {"ok"}
    assert status == 0
    assert not (tmp_path / "var").exists(), "it leaves nothing behind"


def test_what_is_wrong_is_all_told(tmp_path: Path) -> None:
    options = ["--maxmemory-policy", "allkeys-lru"]
    with RedisServer(valkey_binary(), tmp_path, None, options) as server:
        status, levels = doctor(
            tmp_path,
            REDIS_URL=server.url,
            BROKER_URL=f"redis://127.0.0.1:{free_port()}/0",
            MODEL="/no/such.gguf",
            PORT=str(server.port),
            UCX_TLS="self",
            HOST="0.0.0.0",
        )
    assert status == 1
    for subject in ("model", "eviction", "broker", "NIXL", "PORT", "access"):
        assert levels[subject] == "fail", subject
    assert levels["durability"] == "warn"


@pytest.mark.parametrize(
    ("env", "subject"), [({"REDIS_URL": "redis://127.0.0.1:1/0"}, "redis"), ({"PORT": "70000"}, "settings")]
)
def test_nothing_is_needed_to_ask(tmp_path: Path, env: dict[str, str], subject: str) -> None:
    status, levels = doctor(tmp_path, DEVICE="cpu", **env)
    assert (status, levels[subject]) == (1, "fail")
