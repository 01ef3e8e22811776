"""Entries of one request become spans: a whole way, one begun again, one that goes on, and wrong clocks."""

from typing import Any

import pytest

from app.generation.timeline_view import timeline_view
from relay.request import Record, State, Timings
from relay.sampling import SamplingParams
from relay.stamps import Stamps
from relay.stretches import Stretch
from relay.timeline import Entry, Span, Timeline

NOW = 1_000_500.0
STAMPS = Stamps(
    2,
    30.0,
    (Stretch(40.0, 60.0, 8), Stretch(60.0, 75.0, 4)),
    (Stretch(62.0, 70.0, 64, 0, 6), Stretch(77.0, 78.0, 320)),
)


def moved(stamps: Stamps, by_ms: float) -> Stamps:
    def all_of(stretches: tuple[Stretch, ...]) -> tuple[Stretch, ...]:
        return tuple(s._replace(start=s.start + by_ms, end=s.end + by_ms) for s in stretches)

    published = None if stamps.published is None else stamps.published + by_ms
    return Stamps(stamps.cached_tokens, published, all_of(stamps.chunks), all_of(stamps.sends))


def entry(name: str, at_ms: float, leg: str = "", tokens: int = 0, detail: str = "") -> Entry:
    return Entry(name, 1e6 + at_ms, leg, tokens, detail)


def relay(begun_ms: float = 10.0, tokens: int = 0, shift_ms: float = 0.0, there: int = 0) -> list[Entry]:
    """From the claim of a prefill worker to the first token; `there`: pages that are not sent."""
    at = begun_ms
    return [
        entry("claimed", at, "prefill", tokens, "P"),
        entry("queued", at, "decode", tokens),
        entry("claimed", at + 5, "decode", tokens, "D"),
        entry("published", at + 15, "decode", tokens, str(there)),
        entry("stamps", at + 80, "prefill", tokens, moved(STAMPS, 1e6 + at - 10 + shift_ms).pack()),
        entry("ready", at + 80, "prefill", tokens),
        entry("first", at + 90, "decode", tokens + 1),
    ]


SUBMITTED = [entry("submitted", 2.0, detail="2.000"), entry("queued", 2.0, "prefill")]


def timeline(
    entries: list[Entry], state: State = State.FINISHED, tokens: int = 5, ended: float = 200.0
) -> Timeline:
    timings = Timings(submitted=1e6, ended=1e6 + ended if state.terminal else 0)
    record = Record(
        *(
            "r",
            state,
            "request",
            "",
            SamplingParams(9),
            12,
            tokens,
            2,
            1,
            0,
            "stop",
            None,
            None,
            None,
            timings,
        )
    )
    return Timeline(record, entries, NOW)


def spans(*given: Any, **more: Any) -> list[Span]:
    """Moments since arrival."""
    found = timeline(*given, **more)
    start = found.arrived_ms
    return [
        s._replace(start_ms=s.start_ms - start, end_ms=None if s.end_ms is None else s.end_ms - start)
        for s in found.spans()
    ]


def test_the_spans_of_a_whole_relay() -> None:
    found = spans([*SUBMITTED, *relay(), entry("ended", 200.0, "", 5, "finished")])
    assert [(s.name, s.process, round(s.start_ms, 3), round(s.end_ms or 0, 3)) for s in found] == [
        ("accept", "gateway", 0, 2),
        ("queued", "gateway", 2, 10),
        ("bootstrap", "P", 10, 30),
        ("prefill", "P", 40, 75),
        ("queued", "gateway", 10, 15),
        ("reserve", "D", 15, 25),
        ("transfer", "P", 62, 78),
        ("wait", "P", 10, 40),
        ("chunk", "P", 40, 60),
        ("chunk", "P", 60, 75),
        ("send", "P", 62, 70),
        ("seal", "P", 77, 78),
        ("admit", "D", 90, 100),
        ("decode", "D", 100, 200),
    ]
    parents = {(s.name, found[s.parent].name) for s in found if s.parent is not None}
    assert parents == {
        *(("queued", "bootstrap"), ("reserve", "bootstrap"), ("chunk", "prefill")),
        *(("send", "transfer"), ("seal", "transfer")),
    }
    attributes = {s.name: s.attributes for s in found}
    assert attributes["prefill"] == {"cached_tokens": 2}
    assert attributes["chunk"] == {"tokens": 4}
    assert attributes["send"] == {"bytes": 64, "layers": "0-5"}
    assert attributes["transfer"] == {"peer": "D", "bytes": 64}
    (transfer,) = (s for s in spans([*SUBMITTED, *relay(there=3)]) if s.name == "transfer")
    assert transfer.attributes == {"peer": "D", "spared_pages": 3, "bytes": 64}
    assert attributes["decode"] == {"tokens": 5}


@pytest.mark.parametrize("shift_ms", [-10_000.0, 10_000.0])
def test_a_clock_that_is_wrong_makes_no_span_negative_or_longer_than_its_leg(shift_ms: float) -> None:
    found = spans([*SUBMITTED, *relay(shift_ms=shift_ms), entry("ended", 200.0, "", 5, "finished")])
    assert all(s.end_ms is not None and 0 <= s.start_ms <= s.end_ms <= 200 for s in found)
    assert all(s.start_ms >= 10 and (s.end_ms or 0) <= 90 for s in found if s.process == "P")


def test_a_server_whose_clock_is_set_back_makes_no_span_negative() -> None:
    back = [e._replace(at_ms=e.at_ms - 1000) for e in relay()]
    assert all(0 <= s.start_ms <= (s.end_ms or 0) for s in spans([*SUBMITTED, *back]) if s.end_ms is not None)


def test_a_killed_worker_ends_what_ran_and_the_next_attempt_has_spans_of_its_own() -> None:
    died = [
        entry("released", 150.0, "decode", 3, "expired"),
        entry("queued", 150.0, "prefill", 3),
        *relay(160.0, tokens=3),
        entry("ended", 400.0, "", 5, "finished"),
    ]
    found = spans([*SUBMITTED, *relay(), *died], ended=400.0)
    assert [
        (s.attempt, s.start_ms, s.end_ms, s.attributes["tokens"]) for s in found if s.name == "decode"
    ] == [
        (1, 100, 150, 3),
        (2, 250, 400, 2),
    ]
    (released,) = (s for s in found if s.name == "released")
    assert released == Span("released", "D", 1, 150, 150, None, {"leg": "decode", "why": "expired"})
    assert timeline_view(timeline([*SUBMITTED, *relay(), *died]))["attempts"] == 2


def test_another_decode_worker_before_pages_are_published_is_no_new_attempt() -> None:
    claimed, *_ = way = relay()
    again = [
        claimed,
        way[1],
        entry("claimed", 12.0, "decode", 0, "D1"),
        entry("released", 13.0, "decode", 0, "pressure"),
        entry("queued", 13.0, "decode"),
        *way[2:],
    ]
    found = spans([*SUBMITTED, *again, entry("ended", 200.0, "", 5, "finished")])
    assert {s.attempt for s in found} == {1}
    assert [(s.process, s.start_ms, s.end_ms) for s in found if s.name == "reserve"] == [
        ("D1", 12, 13),
        ("D", 15, 25),
    ]
    assert [(s.start_ms, s.end_ms) for s in found if s.name == "bootstrap"] == [(10, 30)]


def test_a_prefill_leg_that_is_handed_back_tells_what_it_had_done() -> None:
    told = Stamps(0, None, (Stretch(1e6 + 20, 1e6 + 30, 8),))
    handed = [
        *relay()[:2],
        entry("stamps", 40.0, "prefill", 0, told.pack()),
        entry("released", 40.0, "prefill", 0, "drain"),
        entry("queued", 40.0, "prefill"),
    ]
    found = spans([*SUBMITTED, *handed], State.QUEUED)
    assert [(s.name, s.attempt) for s in found if s.end_ms is None] == [("queued", 2)]
    assert [(s.start_ms, s.end_ms) for s in found if s.name == "chunk"] == [(20, 30)]


def test_a_leg_that_had_done_nothing_ends_when_it_is_handed_back() -> None:
    handed = [
        *relay()[:4],
        entry("stamps", 40.0, "prefill", 0, Stamps(0, 1e6 + 35).pack()),
        entry("released", 40.0, "prefill", 0, "peer"),
    ]
    found = spans([*SUBMITTED, *handed], State.QUEUED)
    assert {s.name: s.end_ms for s in found if s.name in ("bootstrap", "prefill", "transfer")} == {
        "bootstrap": 35,
        "prefill": 40,
        "transfer": 40,
    }


def test_a_prefill_that_goes_on_shows_its_chunks() -> None:
    so_far = Stamps(4, None, (Stretch(1e6 + 20, 1e6 + 30, 8),))
    going = timeline([*SUBMITTED, *relay()[:4]], State.PREFILL)._replace(progress=so_far)
    found = {s.name: s for s in going.spans()}
    assert (found["prefill"].start_ms, found["prefill"].end_ms) == (1e6 + 20, None)
    assert found["prefill"].attributes == {"cached_tokens": 4}
    assert (found["chunk"].end_ms, found["chunk"].attributes) == (1e6 + 30, {"tokens": 8})


def test_what_goes_on_has_no_end() -> None:
    found = spans([*SUBMITTED, *relay()[:4]], State.PREFILL)
    assert {s.name for s in found if s.end_ms is None} == {"prefill", "transfer"}
    running = spans([*SUBMITTED, *relay()], State.DECODE, tokens=4)
    assert [(s.name, s.attributes) for s in running if s.end_ms is None] == [("decode", {"tokens": 4})]


def test_one_worker_runs_both_legs_and_a_repeated_account_changes_nothing() -> None:
    told = entry("stamps", 80.0, "both", 0, moved(STAMPS, 1e6)._replace(sends=(), published=None).pack())
    way = [entry("claimed", 10.0, "both", 0, "U"), told, entry("first", 80.0, "decode", 1)]
    expected = ["accept", "queued", "prefill", "wait", "chunk", "chunk", "decode"]
    for repeated in ([], [told, entry("first", 81.0, "decode", 2)]):
        found = spans([*SUBMITTED, *way, *repeated, entry("ended", 90.0, "", 3, "finished")], tokens=3)
        assert [s.name for s in found] == expected
        assert found[-1].attributes == {"tokens": 3}


def test_a_fork_waits_for_its_leader() -> None:
    waits = [SUBMITTED[0], entry("waits", 2.0, detail="r"), entry("claimed", 50.0, "both", 0, "D")]
    found = spans(waits, State.DECODE)
    assert [(s.name, s.end_ms, s.attributes) for s in found[1:]] == [
        ("queued", 50, {"leader": "r"}),
        ("prefill", None, {}),
    ]


def test_a_way_too_long_to_be_noted_ends_with_its_request() -> None:
    found = spans([*SUBMITTED, *relay()], State.CANCELLED, ended=300.0)
    assert [s.end_ms for s in found if s.name == "decode"] == [300]


def test_a_request_that_an_earlier_version_began_has_the_spans_since() -> None:
    assert timeline_view(timeline([]))["spans"] == []
    found = timeline_view(timeline([*relay(), entry("ended", 200.0, "", 5, "finished")]))
    assert found["arrived"] == 1000.0
    assert found["spans"][0]["name"] == "bootstrap"
