"""What `kvrelay doctor` makes of facts."""

from pathlib import Path
from typing import Any

import pytest

from app.doctor.engine import judge_engine
from app.doctor.finding import Finding
from app.doctor.model import judge_memory
from app.doctor.redis_server import judge_clock, judge_server
from workers.machine import compiles

SERVER = {
    "server_name": "valkey",
    "valkey_version": "9.1.2",
    "redis_version": "7.2.4",
    "role": "master",
    "maxmemory": 1 << 30,
    "maxmemory_policy": "noeviction",
    "aof_enabled": 1,
    "aof_last_write_status": "ok",
}
ENGINE = {"python": "3.11.7", "torch": "2.13.0", "device": "cpu", "kernels": "cpu", "isa": "avx2"}
NIXL = {"package": "nixl_cu13", "version": "1.5.1"}
GPU = {"device": "cuda", "cuda": "13.0", "gpu": "H200", "gpu_bytes": 1 << 37, "flashinfer": "0.7.4"}


def worst(findings: Any) -> tuple[str, str]:
    """Level and subject of what is worst, or of the last."""
    order = ("ok", "warn", "fail")
    found: list[Finding] = sorted(findings, key=lambda finding: order.index(finding.level))
    assert all(finding.todo for finding in found if finding.level != "ok"), "it says what to do"
    return found[-1].level, found[-1].subject


@pytest.mark.parametrize(
    ("change", "answer_ms", "expected"),
    [
        ({}, 0.2, ("ok", "durability")),
        ({"redis_version": "6.2.14"}, 0.2, ("fail", "redis")),
        ({"role": "slave"}, 0.2, ("fail", "redis")),
        ({}, 12.0, ("warn", "redis")),
        ({"maxmemory_policy": "allkeys-lru"}, 0.2, ("fail", "eviction")),
        ({"maxmemory": 0}, 0.2, ("warn", "eviction")),
        ({"aof_enabled": 0}, 0.2, ("warn", "durability")),
        ({"aof_last_write_status": "err"}, 0.2, ("fail", "durability")),
    ],
)
def test_a_server(change: dict[str, Any], answer_ms: float, expected: tuple[str, str]) -> None:
    assert worst(judge_server(SERVER | change, "redis://here", answer_ms)) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ("ok", "NIXL")),
        ({"isa": "baseline"}, ("warn", "kernels")),
        ({"kernels": "reference", "isa": None}, ("warn", "kernels")),
        ({"error": "DEVICE=cuda, but torch sees no GPU: check nvidia-smi"}, ("fail", "engine")),
        ({"nixl": {"error": "NIXL cannot start UCX (x). Unset UCX_TLS."}}, ("fail", "NIXL")),
        (GPU | {"kernels": "flashinfer", "compiles": True}, ("ok", "NIXL")),
        (GPU | {"kernels": "flashinfer", "compiles": False}, ("warn", "kernels")),
        (GPU | {"kernels": "reference", "flashinfer": None}, ("warn", "kernels")),
    ],
)
def test_an_engine(change: dict[str, Any], expected: tuple[str, str]) -> None:
    assert worst(judge_engine(ENGINE | {"nixl": NIXL} | change)) == expected


def test_memory_is_for_all_workers() -> None:
    needed = 2 * (1_000 + 512 + 400)
    assert judge_memory(1_000, 512, 2, needed).level == "ok"
    assert judge_memory(1_000, 512, 2, needed - 1).level == "warn"


def test_a_clock_may_be_off_by_less_than_a_lease() -> None:
    assert [judge_clock(s).level for s in (-3.0, -1.0, 0.0, 1.0, 3.0)] == ["warn", "ok", "ok", "ok", "warn"]
    assert "behind" in judge_clock(60.0).what


def test_a_compiler_is_looked_for_where_flashinfer_looks(tmp_path: Path) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.touch(mode=0o755)
    assert compiles({"PATH": str(nvcc.parent), "CUDA_HOME": "/nowhere"})
    assert compiles({"CUDA_HOME": str(tmp_path)})
    assert not compiles({"PATH": "/nowhere", "CUDA_HOME": "/nowhere"})
    assert compiles({"CUDA_HOME": "/nowhere", "FLASHINFER_DISABLE_JIT": "1"}), "an image has what it needs"
