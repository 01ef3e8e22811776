"""A long way in bounded space, and what is said of it in few digits."""

from itertools import pairwise

import pytest

from relay.server_clock import ServerClock
from relay.stamps import Stamps
from relay.stretches import Stretch, Stretches


@pytest.mark.parametrize("pieces", [0, 1, 3, 4, 5, 8, 9, 100, 1_000])
def test_beyond_the_bound_neighbours_are_joined_and_nothing_is_lost(pieces: int) -> None:
    stretches = Stretches(most=4)
    for i in range(pieces):
        stretches.add(Stretch(float(i), i + 0.5, 10, i % 3, i % 3 + 1))
    kept = stretches.all
    assert len(kept) <= 4
    assert sum(stretch.joined for stretch in kept) == pieces
    assert sum(stretch.amount for stretch in kept) == 10 * pieces
    assert [s.start for s in kept] == sorted(s.start for s in kept)
    if pieces:
        assert (kept[0].start, kept[-1].end) == (0.0, pieces - 0.5)
        assert all(first.end <= second.start for first, second in pairwise(kept))


def test_a_joined_write_has_the_layers_of_both() -> None:
    assert Stretch(1.0, 2.0, 5, 0, 6).join(Stretch(1.5, 3.0, 7, 6, 12)) == Stretch(1.0, 3.0, 12, 0, 12, 2)


def test_stamps_are_in_the_time_of_the_server() -> None:
    clock = ServerClock(1.7e12, 100.0)
    stamps = Stamps.told(clock, 16, [Stretch(100.5, 101.0, 32)], [Stretch(101.0, 101.25, 64, 0, 6)], 100.25)
    assert stamps.prefill == (1.7e12 + 500, 1.7e12 + 1000)
    assert stamps.published == 1.7e12 + 250
    assert stamps.sends == (Stretch(1.7e12 + 1000, 1.7e12 + 1250, 64, 0, 6),)


@pytest.mark.parametrize(
    "stamps",
    [
        Stamps(),
        Stamps(published=1.7e12),
        Stamps(3, None, (Stretch(1.7e12, 1.7e12 + 1.125, 9, joined=4),)),
        Stamps(
            3, 1.7e12, (Stretch(1.7e12 + 2, 1.7e12 + 3, 9),), (Stretch(1.7e12 + 4, 1.7e12 + 5, 8, 6, 12),)
        ),
    ],
)
def test_stamps_come_back_as_they_were_told(stamps: Stamps) -> None:
    assert Stamps.unpack(stamps.pack()) == stamps


def test_the_most_that_one_leg_tells_is_a_few_kilobytes() -> None:
    chunks, sends = Stretches(), Stretches()
    for i in range(10_000):
        chunks.add(Stretch(1e4 + i, 1e4 + i + 0.123456, 512))
        sends.add(Stretch(1e4 + i, 1e4 + i + 0.123456, 1 << 24, 0, 30))
    told = Stamps.told(ServerClock(1.7e12, 1e4), 0, chunks.all, sends.all, 1e4).pack()
    assert len(told) < 7_000
