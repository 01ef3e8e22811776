"""Marks name the beginnings of a prompt, so that who has seen one knows another that begins like it."""

from base64 import urlsafe_b64encode
from hashlib import blake2b

SHORTEST_TOKENS = 128
STEPS = 8  # from one length to twice that: of what two prompts share less than a ninth is past the last mark
MARK_LETTERS = 8  # 48 bits: that two beginnings meet in one would only send a prompt to another worker
_TOKEN_BYTES = 4


def marked_tokens(index: int) -> int:
    """How many tokens the beginning has whose mark is number `index`, from 0 on. rooms.lua knows it too."""
    doublings, step = divmod(index, STEPS)
    return (STEPS + step) * (SHORTEST_TOKENS // STEPS) << doublings


def marks(packed: bytes, whose: str | None = None) -> str:
    """Of a prompt whose token ids `pack_ints` has packed: one mark behind the other, that of the shortest
    beginning first. Those for somebody (a request's `cache_salt`) are nobody else's, as in the prefix
    cache."""
    owner = b"" if whose is None else b"\0" + whose.encode()
    digest = blake2b(blake2b(owner).digest(), digest_size=MARK_LETTERS * 6 // 8)
    made: list[bytes] = []
    start, end = 0, marked_tokens(0) * _TOKEN_BYTES
    while end <= len(packed):
        digest.update(packed[start:end])
        made.append(digest.digest())
        start, end = end, marked_tokens(len(made)) * _TOKEN_BYTES
    return urlsafe_b64encode(b"".join(made)).decode()
