"""Checks of disk and server against real ones."""

from pathlib import Path

import pytest

from app.launch.checks import CheckFailed, check_folder, check_redis
from tests.servers import RedisServer


def test_a_full_disk_is_told_with_what_is_needed(tmp_path: Path) -> None:
    check_folder(tmp_path / "new")
    with pytest.raises(CheckFailed, match=r"MB left and about 1000000000 MB are needed: .* VAR_DIR"):
        check_folder(tmp_path, needed_mb=1_000_000_000)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "var").touch()
    with pytest.raises(CheckFailed, match="Cannot write to"):
        check_folder(tmp_path / "var")


def test_a_living_server_is_fine(server: RedisServer) -> None:
    check_redis(server.url)
