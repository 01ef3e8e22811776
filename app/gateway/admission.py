"""May a request be accepted by the workers that live now?"""

from collections.abc import Iterable, Sequence
from enum import StrEnum

from relay.worker_card import WorkerCard

_PREFILL = ("prefill", "unified")
_DECODE = ("decode", "unified")


class Missing(StrEnum):
    """What a deployment needs before it can serve; a unified worker is both."""

    PREFILL = "prefill"
    DECODE = "decode"


def missing(workers: Iterable[WorkerCard]) -> list[Missing]:
    """The kinds of worker that nobody alive is; empty when requests can be served."""
    roles = {worker.role for worker in workers}
    without = [Missing.PREFILL] if not roles.intersection(_PREFILL) else []
    return without + ([Missing.DECODE] if not roles.intersection(_DECODE) else [])


def most_output_tokens(prompt_tokens: int, workers: Sequence[WorkerCard]) -> int:
    """The most output tokens that living workers could hold after this prompt; 0 or less: it fits nowhere.

    A prefill worker needs room for the output too: after a crash it prefills prompt and stream.
    """
    largest = {
        role: max((worker.capacity_tokens for worker in workers if worker.role == role), default=0)
        for role in ("prefill", "decode", "unified")
    }
    return max(largest["unified"], min(largest["prefill"], largest["decode"])) - prompt_tokens
