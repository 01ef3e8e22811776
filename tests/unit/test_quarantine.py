"""Quarantine: only proof ends it, and only what proof does not reach restarts a worker."""

import pytest

from tests.desk import card
from workers.quarantine import PATIENCE_S, Quarantine, Suspect, Unproven, restart_helps


def suspect(room: int, pages: int = 4, since: float = 0.0) -> Suspect:
    return Suspect(room, card("P").incarnation, pages, since)


def test_a_room_waits_until_it_is_proven() -> None:
    quarantine = Quarantine()
    quarantine.add(suspect(1))
    quarantine.add(suspect(2, pages=3))
    assert quarantine.unproven == [Unproven(4, 0.0), Unproven(3, 0.0)]
    assert quarantine.prove(1)
    assert not quarantine.prove(1)
    assert not quarantine.prove(7)
    assert len(quarantine) == 1


def test_a_room_that_comes_twice_keeps_all_its_pages_and_its_age() -> None:
    quarantine = Quarantine()
    quarantine.add(suspect(1, pages=4, since=10.0))
    quarantine.add(suspect(1, pages=3, since=20.0))
    assert quarantine.unproven == [Unproven(7, 10.0)]
    assert quarantine.prove(1)
    assert len(quarantine) == 0


def test_a_writer_must_be_seen_dead_twice() -> None:
    quarantine = Quarantine()
    quarantine.add(suspect(1))
    assert [quarantine.saw_dead(1), quarantine.saw_dead(1)] == [False, True]
    quarantine.prove(1)
    assert not quarantine.saw_dead(1)


def test_each_room_is_asked_about_once_a_second() -> None:
    quarantine = Quarantine()
    quarantine.add(suspect(1))
    assert [s.room for s in quarantine.to_ask(100.0)] == [1]
    quarantine.add(suspect(2))
    assert quarantine.to_ask(100.5) == []
    assert [s.room for s in quarantine.to_ask(101.0)] == [1, 2]


@pytest.mark.parametrize(
    ("waits_s", "pages", "restart"),
    [
        (0.0, 100, False),  # a peer died with all its rooms a moment ago
        (PATIENCE_S + 1, 25, False),
        (PATIENCE_S + 1, 26, True),  # more than the share
        (299.0, 1, False),
        (301.0, 1, True),  # older than the age
    ],
)
def test_when_a_restart_helps(waits_s: float, pages: int, restart: bool) -> None:
    unproven = [Unproven(pages, 1000.0 - waits_s)]
    assert restart_helps(unproven, 100, share=0.25, age_s=300, now=1000.0) is restart


def test_the_share_counts_what_waits_long_over_all_rooms() -> None:
    old, new = Unproven(20, 0.0), Unproven(20, 95.0)
    assert not restart_helps([old, new], 100, share=0.25, age_s=300, now=100.0)
    assert restart_helps([old, old], 100, share=0.25, age_s=300, now=100.0)
    assert not restart_helps([], 100, share=0.25, age_s=300, now=100.0)
