"""The plumbing of bench/gpu/run.sh, on a CPU: parts that fail or hang do not take the others along."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
DEADLINE_S = 20.0


def limited(seconds: float, command: str) -> int:
    run = [sys.executable, "-m", "bench.gpu.limited", str(seconds), "bash", "-c", command]
    return subprocess.run(run, cwd=ROOT, timeout=60).returncode


def test_what_hangs_is_ended_and_what_it_started_too(tmp_path: Path) -> None:
    """Also a process of another session whose parent is gone."""
    note = tmp_path / "pid"
    orphan = f"(setsid bash -c 'echo $$ >{note}.new; mv {note}.new {note}; exec sleep 1000' &)"
    assert limited(2, f"{orphan}; trap '' TERM; sleep 1000; sleep 1000") == 124
    assert not psutil.pid_exists(int(note.read_text()))


def test_what_ends_by_itself_says_how_and_leaves_nothing(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    start = time.monotonic()
    command = f"setsid sleep 1000 & echo $! >{note}; exit 3"
    assert limited(60, command) == 3
    assert time.monotonic() - start < DEADLINE_S
    assert not psutil.pid_exists(int(note.read_text()))


def test_a_failing_part_leaves_the_others_their_results(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHON": sys.executable, "PARTS": "limits contract steps"}
    env["PYTEST_ADDOPTS"] = "--no-such-option"
    run = ["bash", "bench/gpu/run.sh", "--dry-run", str(tmp_path)]
    done = subprocess.run(run, cwd=ROOT, env=env, capture_output=True, text=True, timeout=150)
    table = (tmp_path / "table.txt").read_text()
    assert done.returncode == 1
    assert done.stdout.endswith(table)
    for line in ("limits: ok", "contract: failed", "steps: ok", "prefill, 64 tokens"):
        assert line in table
    assert "no results of: transfer, relay" in table


def test_what_was_unpacked_does_not_stay(tmp_path: Path) -> None:
    script, pack = tmp_path / "bench/gpu/run.sh", tmp_path / "build/gpu/pack.tar.xz"
    for folder in (script.parent, pack.parent, tmp_path / "site", tmp_path / "tmp"):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / "bench/gpu/run.sh", script)
    subprocess.run(["tar", "-C", tmp_path, "-cJf", pack, "site"], check=True)
    env = {**os.environ, "PARTS": "none", "TMPDIR": str(tmp_path / "tmp")}
    done = subprocess.run(["bash", script], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert not list((tmp_path / "tmp").iterdir())
