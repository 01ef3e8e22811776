"""Log probabilities of a prompt in Redis: there before the first token, the first ones stay, all expire."""

from typing import Any

import numpy as np
import pytest

from relay.answers import Emission, Prefilled
from relay.prompt_logprobs import PromptLogprobs
from relay.request import Claimed, Finish, Leg
from relay.rooms import Rooms
from tests.integration.scene import PREFILLED, TRANSFER, claim, submission, tokens


def scores(value: float) -> PromptLogprobs:
    ids = np.array([[7, 8], [9, 7]], np.int32)
    return PromptLogprobs(ids, np.full((2, 2), value, np.float32), np.array([1, 2], np.int32))


def prefilled(value: float) -> Prefilled:
    return PREFILLED._replace(scores=scores(value))


def claimed(rooms: Rooms, leg: Leg) -> Claimed:
    got = claim(rooms, leg, f"worker of {leg}")
    assert got
    return got.claimed


def values(rooms: Rooms, request_id: str) -> Any:
    found = rooms.scores(request_id)
    return None if found is None else found.logprobs.tolist()


@pytest.mark.parametrize("unified", [True, False])
def test_they_come_with_the_prefill_and_stay(rooms: Rooms, unified: bool) -> None:
    request_id = rooms.submit(submission()).request_id
    assert rooms.scores(request_id) is None
    if unified:
        hold = claimed(rooms, Leg.BOTH).hold
        emission = Emission(hold, 0, tokens(0, 1), None, prefilled(-1.0))
        for _ in range(2):
            rooms.emit([emission])
    else:
        first = claimed(rooms, Leg.PREFILL)
        hold = claimed(rooms, Leg.DECODE).hold
        rooms.publish(hold, first.room, [1], 0)
        for _ in range(2):
            assert rooms.kv_ready(first.hold, first.room, prefilled(-1.0), TRANSFER).ok
        rooms.emit([Emission(hold, 0, tokens(0, 1))])
    assert values(rooms, request_id) == [[-1.0, -1.0], [-1.0, -1.0]]
    assert rooms.redis.pttl(f"{rooms.root}:scores:{request_id}") == -1
    rooms.emit([Emission(hold, 1, tokens(1, 1), None, prefilled(-2.0))])  # as a later attempt might say
    rooms.emit([Emission(hold, 2, [], Finish("length"))])
    assert values(rooms, request_id) == [[-1.0, -1.0], [-1.0, -1.0]]
    assert rooms.redis.pttl(f"{rooms.root}:scores:{request_id}") > 0


def test_who_lost_the_leg_says_nothing(rooms: Rooms) -> None:
    request_id = rooms.submit(submission()).request_id
    hold = claimed(rooms, Leg.BOTH).hold
    rooms.cancel(request_id)
    rooms.emit([Emission(hold, 0, tokens(0, 1), None, prefilled(-1.0))])
    assert rooms.scores(request_id) is None


def test_an_end_without_any_token(rooms: Rooms) -> None:
    request_id = rooms.submit(submission()).request_id
    hold = claimed(rooms, Leg.BOTH).hold
    rooms.emit([Emission(hold, 0, [], Finish("length"), prefilled(-1.0))])
    record = rooms.record(request_id)
    assert record is not None
    assert (record.state, record.completion_tokens, record.finish_reason) == ("finished", 0, "length")
    assert values(rooms, request_id) is not None
