"""What a body leaves to begin its answer with."""

from typing import Any

import pytest

from app.fields.first_token import leaves_nothing
from relay.sampling import SamplingParams

EOS = (2,)
MASK = bytes([0b0011_0100, 0b1])  # of a grammar whose answers begin with token 2 (their end), 4, 5 or 8


@pytest.mark.parametrize(
    ("fields", "mask", "nothing"),
    [
        ({}, None, False),
        ({}, MASK, False),
        ({"allowed_token_ids": (8,)}, MASK, False),
        ({"allowed_token_ids": (1, 7, 9, 4000)}, MASK, True),
        ({"allowed_token_ids": (4,), "bad_words": ((4,),)}, None, True),
        ({"allowed_token_ids": (4,), "bad_words": ((4, 4),)}, None, False),
        ({"bad_words": ((2,), (4,), (5,), (8,))}, MASK, True),
        ({"bad_words": ((4,), (5,), (8,))}, MASK, False),
        ({"allowed_token_ids": (2,), "min_tokens": 1}, None, True),
        ({"allowed_token_ids": (2,), "min_tokens": 1, "ignore_eos": True}, None, False),
        ({"allowed_token_ids": (2,), "min_tokens": 1}, MASK, False),
        ({"allowed_token_ids": (7,), "min_tokens": 1, "stop_token_ids": (7,)}, None, True),
    ],
)
def test_what_is_left(fields: dict[str, Any], mask: bytes | None, nothing: bool) -> None:
    assert leaves_nothing(SamplingParams(max_tokens=5, **fields), EOS, mask) is nothing
