"""Where the engine's time goes and what it did, for metrics."""

from typing import NamedTuple


class EngineStats(NamedTuple):
    """Sums over all steps. `step_s` is whole steps; what none of the other times has is the scheduler's own.

    `plan_s` builds tensors and kernel plans, `forward_s` is the model, `sample_s` the choice of tokens; on a
    GPU `forward_s` only launches, and `sample_s` has the wait for what was launched before. Of all prompt
    tokens `prefill_tokens` were computed and `cached_tokens` found in the prefix cache. Of `reserved_tokens`,
    those of prompts whose KV came from a peer, `spared_tokens` were found there, so that nothing was sent for
    them.
    """

    steps: int = 0
    step_s: float = 0.0
    plan_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    reserved_tokens: int = 0
    spared_tokens: int = 0
    retractions: int = 0
