"""What kvrelay is meant to reach beside its peers."""

from typing import NamedTuple

from bench.peers.turn import STEADY


class Goal(NamedTuple):
    """`ours` / `theirs` of `metric` shall be at least, or at most, `bound`."""

    ours: str
    theirs: str
    clients: int
    metric: str
    bound: float
    at_least: bool = True

    def met(self, ratio: float) -> bool:
        return ratio >= self.bound if self.at_least else ratio <= self.bound

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.bound:g}"


GOALS = (
    *(
        Goal("kvrelay", "vllm", clients, "tokens_s", bound)
        for clients, bound in ((1, 2.5), (4, 2.0), (8, 1.8), (16, 1.6))
    ),
    Goal("kvrelay", "llama", 1, "gap_p50_ms", 0.5, at_least=False),
    *(
        Goal("kvrelay-1p1d", "vllm-1p1d", clients, "tokens_s", bound)
        for clients, bound in ((1, 2.2), (4, 2.5), (8, 2.0), (16, 1.5))
    ),
    Goal("kvrelay-1p1d", "vllm-1p1d", 1, "first_s", 0.85, at_least=False),
    *(
        Goal("kvrelay-1p1d", "vllm-1p1d", clients, "gap_p99_ms", 0.6, at_least=False)
        for clients in (1, 4, 8, 16)
    ),
)

# A system against itself: the steady stream under 1,000-token prompts every 2 s.
STEADY_GOAL = Goal("kvrelay-1p1d", "kvrelay-1p1d", STEADY, "disturbed_ratio", 1.15, at_least=False)
