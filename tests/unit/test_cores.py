"""The quota of a container, in both versions of control groups."""

import os
from pathlib import Path

import pytest

from workers.cores import usable_cores


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})


@pytest.mark.parametrize(
    ("limit", "cores"), [("max 100000", 4), ("250000 100000", 2), ("800000 100000", 4), ("50000 100000", 1)]
)
def test_a_quota(four_cores: None, tmp_path: Path, limit: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(("quota_us", "cores"), [(-1, 4), (150_000, 1), (300_000, 3)])
def test_a_quota_of_version_1(four_cores: None, tmp_path: Path, quota_us: int, cores: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text(f"{quota_us}\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == cores


def test_without_control_groups(four_cores: None, tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 4
