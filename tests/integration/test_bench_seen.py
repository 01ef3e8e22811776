"""What `python -m bench observed` switches: how often Redis counts and notes; and what it concludes."""

from typing import Any

import pytest

from bench.observed import Window, costs
from bench.seen.switch import TIMES, Seen, library
from relay.rooms import Rooms
from tests.integration.scene import submission


@pytest.mark.parametrize(
    ("seen", "counted", "noted"), [(Seen.NOTHING, 0, 0), (Seen.METRICS, TIMES, 0), (Seen.ALL, TIMES, TIMES)]
)
def test_counts_and_notes_are_as_many_as_asked(rooms: Rooms, seen: Seen, counted: int, noted: int) -> None:
    redis: Any = rooms.redis
    assert rooms.record("req_none") is None
    redis.function_load(library(seen), replace=True)
    rooms.submit(submission("req_a"))
    assert sum(times for what, times in rooms.counts().items() if what[0] == "submitted") == counted
    timelines = [redis.llen(f"{rooms.root}:{name}:req_a") for name in ("timeline", "aside")]
    assert (timelines[0] > 0, sum(timelines)) == (noted > 0, 2 * noted)  # submitted, queued
    rooms.cancel("req_a")


def test_a_cost_is_a_tenth_of_what_ten_times_cost() -> None:
    windows = [
        {Seen.NOTHING: Window(rate, 2.0), Seen.METRICS: Window(0.9 * rate, 2.2), Seen.ALL: Window(rate, 2.0)}
        for rate in (300.0, 400.0)
    ]
    assert costs(windows, Seen.METRICS) == pytest.approx((1.0, 0.0, 1.0, 0.0))
    assert costs(windows, Seen.ALL) == pytest.approx((0.0, 0.0, 0.0, 0.0))
