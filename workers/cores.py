"""How many cores this process may keep busy."""

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def usable_cores(cgroups: Path = CGROUPS) -> int:
    """The cores it may run on, and no more than the quota of its container allows: threads beyond that quota
    would all be stopped for the rest of each period, also in the middle of a step."""
    return max(1, int(min(len(os.sched_getaffinity(0)), _quota(cgroups))))


def _quota(cgroups: Path) -> float:
    """In cores; infinity where there is none. A container finds its own control group at the root."""
    if (limit := cgroups / "cpu.max").exists():
        quota, period = limit.read_text().split()
    elif (limit := cgroups / "cpu/cpu.cfs_quota_us").exists():  # version 1
        quota, period = limit.read_text(), limit.with_name("cpu.cfs_period_us").read_text()
    else:
        quota, period = "max", "1"
    return float("inf") if quota.strip() in ("max", "-1") else int(quota) / int(period)
