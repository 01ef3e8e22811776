"""The model's file, and the memory that workers of it take."""

from collections.abc import Iterator
from pathlib import Path

from app.doctor.finding import Finding, fail, ok, warn
from relay.model_card import read_model_card
from relay.model_file import ModelError, resolve_model
from relay.settings import Settings

_PROCESS_MB = 400  # beside weights and KV: docs/results/cpu-kernels.md
_DEFAULT_POOL_MB = 512


def check_model(settings: Settings) -> Iterator[Finding]:
    try:
        path = resolve_model(settings.model_path)
        card = read_model_card(path)
        size_mb = _size_mb(path)
    except (ModelError, OSError) as error:
        what, _, todo = str(error).partition(": ")
        yield fail("model", what, todo or "set MODEL to a GGUF file or a model directory that can be read")
        return
    yield ok("model", f"{card.name}, {card.architecture}, {size_mb} MiB, {card.context_length_tokens} tokens")
    workers = settings.prefill_workers + settings.decode_workers + settings.unified_workers
    yield judge_memory(size_mb, settings.kv_pool_mb or _DEFAULT_POOL_MB, workers, available_mb())


def judge_memory(weights_mb: int, pool_mb: int, workers: int, available: int) -> Finding:
    """Whether workers that hold weights and KV in this machine's memory find place in it."""
    needed = workers * (weights_mb + pool_mb + _PROCESS_MB)
    what = f"{available} MiB available; {workers} workers on the CPU take about {needed} MiB"
    if needed <= available:
        return ok("memory", what)
    return warn("memory", what, "lower KV_POOL_MB, start fewer workers, or use a smaller model")


def available_mb() -> int:
    """What may be taken: of the machine, and of the container where it has a limit."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free_kb = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    try:
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # no limit
        return free_kb >> 10
    return min(free_kb >> 10, max(0, limit - used) >> 20)


def _size_mb(path: Path) -> int:
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files) >> 20
