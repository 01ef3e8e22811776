"""Whether a body leaves any token to begin its answer with."""

from collections.abc import Collection, Iterable

from app.gateway.errors import invalid
from relay.grammar import Grammars
from relay.sampling import SamplingParams


def refuse_contradiction(params: SamplingParams, eos_ids: Collection[int], grammars: Grammars) -> None:
    """Raises ApiError. Fields may still contradict each other later, with what the model chooses."""
    mask = grammars.check(params.grammar) if params.grammar is not None else None
    if leaves_nothing(params, eos_ids, mask):
        raise invalid(
            "No token may come first: allowed_token_ids, bad_words, min_tokens and the structure forbid all.",
            "allowed_token_ids" if params.allowed_token_ids else "bad_words",
        )


def leaves_nothing(params: SamplingParams, eos_ids: Collection[int], mask: bytes | None) -> bool:
    """`mask` has a bit for each token that the grammar allows first, None without one. The end of a text that
    has to wait is forbidden only where there is no grammar, which has the last word on it."""
    left = -1 if mask is None else int.from_bytes(mask, "little")
    if params.allowed_token_ids:
        left &= _bits(params.allowed_token_ids)
    left &= ~_bits(word[0] for word in params.bad_words if len(word) == 1)
    if params.min_tokens and mask is None:
        left &= ~_bits((*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)))
    return not left


def _bits(ids: Iterable[int]) -> int:
    """A whole number with these bits set."""
    found = set(ids)
    packed = bytearray(max(found, default=0) // 8 + 1)
    for token in found:
        packed[token // 8] |= 1 << token % 8
    return int.from_bytes(packed, "little")
