"""One turn of one system, as it is kept in a results file."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from app.measure.closed_loop import Seen
from app.measure.table import percentile
from bench.peers.load import SeenSteady

STEADY = 0  # instead of a number of clients


@dataclass(frozen=True, slots=True)
class Turn:
    """`run` and `repetition` say which turns were neighbours in time, and `clients` what was asked.

    `METRICS` names the `numbers`. `cpu_ms_per_token` is the CPU time of each process; `others_cpu_s` that of
    the systems whose turn it was not, which should be next to nothing.
    """

    run: str
    repetition: int
    system: str
    clients: int
    numbers: Mapping[str, float]
    cpu_ms_per_token: Mapping[str, float] = field(default_factory=dict)
    others_cpu_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


METRICS = {
    "tokens_s": "output tokens per second",
    "first_s": "time to first token, mean, s",
    "first_p99_s": "time to first token, p99, s",
    "gap_ms": "time between tokens, mean, ms",
    "gap_p50_ms": "time between tokens, median, ms",
    "gap_p99_ms": "time between tokens, p99, ms",
    "steady_p99_ms": "steady stream: p99 between tokens, ms",
    "disturbed_p99_ms": "steady stream under long prompts: p99 between tokens, ms",
    "disturbed_ratio": "disturbed p99 / undisturbed p99",
}


def load_numbers(seen: Seen) -> dict[str, float]:
    return {
        "tokens_s": seen.tokens / seen.seconds,
        "first_s": fmean(seen.first_s),
        "first_p99_s": percentile(seen.first_s, 0.99),
        "gap_ms": 1e3 * fmean(seen.gaps_s),
        "gap_p50_ms": 1e3 * percentile(seen.gaps_s, 0.5),
        "gap_p99_ms": 1e3 * percentile(seen.gaps_s, 0.99),
    }


def steady_numbers(seen: SeenSteady) -> dict[str, float]:
    alone, disturbed = _p99_ms(seen.alone_s), _p99_ms(seen.disturbed_s)
    return {"steady_p99_ms": alone, "disturbed_p99_ms": disturbed, "disturbed_ratio": disturbed / alone}


def _p99_ms(gaps_s: Sequence[float]) -> float:
    return 1e3 * percentile(gaps_s, 0.99)
