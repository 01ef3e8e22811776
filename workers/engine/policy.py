"""What the scheduler decides by: pure functions of numbers."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from relay.sampling import SamplingParams
from workers.engine.messages import Ending

_STEP_SECONDS = 5.0
_STEP_SECONDS_PER_TOKEN = 0.02
_PACE_KEPT = 0.98


class Verdict(NamedTuple):
    """Whether a sequence ends with a token. `stop_token` as in Produced."""

    ending: Ending | None
    stop_token: int | None = None


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_size)


def growth_pages(tokens: int, pages: int, limit_tokens: int, reserve_tokens: int, page_size: int) -> int:
    """Pages to keep for a request of `tokens` tokens in `pages` pages that may grow up to `limit_tokens`."""
    return max(0, pages_for(min(tokens + reserve_tokens, limit_tokens), page_size) - pages)


def fork_tokens(prompt_tokens: int, max_tokens: int, reserve_tokens: int, page_size: int) -> int:
    """What another sample of a prompt needs beside the one whose whole pages it shares, with room to grow."""
    shared_pages = (prompt_tokens - 1) // page_size  # at least one token is computed
    limit_tokens = prompt_tokens + max_tokens
    return page_size * growth_pages(prompt_tokens, shared_pages, limit_tokens, reserve_tokens, page_size)


def free_tokens(available_pages: int, growth: int, waiting_pages: int, page_size: int) -> int:
    """What a new leg may need, after `growth` pages for those that run and the pages of those that wait."""
    return max(0, available_pages - growth - waiting_pages) * page_size


def chunks(pending_tokens: Sequence[int], chunk_tokens: int, decode_rows: int, page_size: int) -> list[int]:
    """Tokens of each prefill in this step, first come first served, within what `decode_rows` leave.

    A chunk that is not the last of its prompt ends at a page boundary (they all start at one). Decoding never
    starves prefill: one page is always left.
    """
    budget = max(chunk_tokens - decode_rows, page_size)
    taken: list[int] = []
    for pending in pending_tokens:
        chunk = pending if pending <= budget else budget // page_size * page_size
        taken.append(chunk)
        budget -= chunk
    return taken


def scored_pending(pending_tokens: Sequence[int], scored: Sequence[bool], most_tokens: int) -> list[int]:
    """What prefills may ask of a step. Each position of a scored prompt has logits in memory until the step
    is over: so only the first such prompt takes part, with at most `most_tokens`, which are whole pages."""
    first = scored.index(True) if True in scored else None
    return [
        pending if not mine else min(pending, most_tokens) if i == first else 0
        for i, (pending, mine) in enumerate(zip(pending_tokens, scored, strict=True))
    ]


def layers_at_once(layers: int, group_layers: int, layer_bytes: int, least_bytes: int) -> int:
    """How many layers' KV of a step, each of `layer_bytes`, goes out together: `group_layers`, or more where
    so few hold less than `least_bytes`, since each write has its price."""
    return min(layers, max(group_layers, -(-least_bytes // layer_bytes)))


def wants_prefill(pending_tokens: int, chunk_tokens: int) -> bool:
    """Whether to admit another prompt: not before a step has room, so that it finds what others computed."""
    return pending_tokens < chunk_tokens


def victim(arrivals_ms: Sequence[float]) -> int | None:
    """Which running request loses its pages: the youngest (the last of equals), but never the oldest."""
    if len(arrivals_ms) < 2:
        return None
    return max(range(len(arrivals_ms)), key=lambda i: (arrivals_ms[i], i))


def turns(solo: Sequence[bool], step: int) -> list[list[int]]:
    """Groups of requests (by index) that may share a step, in the order to try them: each solo one alone, the
    others together, and another group first in each step."""
    together = [i for i, alone in enumerate(solo) if not alone]
    groups = [[i] for i, alone in enumerate(solo) if alone]
    if together:
        groups.append(together)
    first = step % len(groups) if groups else 0
    return groups[first:] + groups[:first]


def verdict(
    token_id: int,
    position: int,
    tokens: int,
    params: SamplingParams,
    eos_ids: Collection[int],
    limit_tokens: int,
) -> Verdict:
    """Whether `token_id` at output `position` ends its sequence, which has `tokens` tokens with it.

    Nothing but length ends it before `min_tokens`, or the end of its grammar, behind which nothing may come.
    At `limit_tokens` there is no room for another token.
    """
    early = position < params.min_tokens
    if token_id in eos_ids and (params.grammar is not None or not (early or params.ignore_eos)):
        return Verdict(Ending.STOP)
    if token_id in params.stop_token_ids and not early:
        return Verdict(Ending.STOP, token_id)
    if full(position + 1, tokens, params.max_tokens, limit_tokens):
        return Verdict(Ending.LENGTH)
    return Verdict(None)


def full(outputs: int, tokens: int, max_tokens: int, limit_tokens: int) -> bool:
    """Whether a sequence of `tokens` tokens, `outputs` of them its own, ends by its length."""
    return outputs >= max_tokens or tokens >= limit_tokens


def pace(fastest: float, tokens: int, seconds: float) -> float:
    """The fastest that prompts were computed lately, in tokens per second, after a step that was full."""
    return max(tokens / seconds, _PACE_KEPT * fastest)


def too_late(left_s: float, tokens: int, tokens_per_s: float) -> bool:
    """Whether the first token cannot come in time. Without a pace (0) only what is over is too late."""
    return left_s <= 0 or (tokens_per_s > 0 and tokens > tokens_per_s * left_s)


def step_seconds(tokens: int) -> float:
    """How long a step of `tokens` tokens may take before this worker stops renewing its leases."""
    return _STEP_SECONDS + _STEP_SECONDS_PER_TOKEN * tokens
