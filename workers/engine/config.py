"""What an operator chooses about the engine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`chunk_tokens` bounds a step, and so the pause between two tokens while another's prompt is computed.

    KV goes out every `group_layers` layers, or more where these hold less than `group_bytes`. Admission
    leaves room for `reserve_tokens` more tokens of each request that runs, so that it is seldom retracted.
    `context_tokens` bounds prompt plus output. Of prompts whose log probabilities are wanted a step computes
    at most `scored_tokens` tokens, rounded up to pages.
    """

    context_tokens: int
    chunk_tokens: int = 512
    group_layers: int = 8
    group_bytes: int = 0
    reserve_tokens: int = 64
    scored_tokens: int = 32

    def __post_init__(self) -> None:
        least = {
            "context_tokens": 1,
            "chunk_tokens": 1,
            "group_layers": 1,
            "group_bytes": 0,
            "reserve_tokens": 0,
            "scored_tokens": 1,
        }
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} is {getattr(self, name)}: set it to at least {minimum}")
