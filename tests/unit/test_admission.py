"""Which requests the living workers could serve."""

import pytest

from app.gateway.admission import Missing, missing, most_output_tokens
from relay.geometry import Geometry
from relay.worker_card import Incarnation, Load, WorkerCard


def card(role: str, capacity_tokens: int = 100) -> WorkerCard:
    geometry = Geometry("f", "float32", 1, 1, 8, 16, 8)
    load = Load(*[0] * len(Load._fields))
    return WorkerCard(Incarnation("b", "h", 1, 1), role, role, geometry, capacity_tokens, b"", load)


@pytest.mark.parametrize(
    ("roles", "without"),
    [
        ([], [Missing.PREFILL, Missing.DECODE]),
        (["prefill"], [Missing.DECODE]),
        (["decode"], [Missing.PREFILL]),
        (["prefill", "decode"], []),
        (["unified"], []),
        (["decode", "unified"], []),
    ],
)
def test_missing(roles: list[str], without: list[Missing]) -> None:
    assert missing([card(role) for role in roles]) == without


@pytest.mark.parametrize(
    ("workers", "prompt_tokens", "most"),
    [
        ([card("unified", 100)], 60, 40),
        ([card("unified", 100), card("unified", 300)], 60, 240),
        ([card("prefill", 100), card("decode", 200)], 60, 40),
        ([card("prefill", 200), card("decode", 100)], 60, 40),
        ([card("prefill", 60), card("decode", 100)], 60, 0),
        ([card("prefill", 10), card("decode", 500), card("unified", 100)], 60, 40),
        ([card("prefill", 400), card("decode", 500), card("unified", 100)], 60, 340),
        ([card("unified", 50)], 60, -10),
        ([], 1, -1),
    ],
)
def test_most_output_tokens(workers: list[WorkerCard], prompt_tokens: int, most: int) -> None:
    assert most_output_tokens(prompt_tokens, workers) == most
