"""The counter-based generator, against the vectors its authors published."""

import statistics

import pytest

from workers.engine.philox import philox4x32, uniform

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers_of_random123(counter, key, expected):
    assert philox4x32(counter, key) == expected


def test_uniform_is_a_function_of_seed_and_position():
    assert uniform(7, 3) == uniform(7, 3)
    assert len({uniform(seed, position) for seed in range(30) for position in range(30)}) == 900
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


def test_uniform_fills_the_unit_interval():
    draws = [uniform(1, position) for position in range(10_000)]
    assert 0.0 <= min(draws) < 0.001
    assert 0.999 < max(draws) < 1.0
    assert statistics.fmean(draws) == pytest.approx(0.5, abs=0.01)
    assert statistics.pvariance(draws) == pytest.approx(1 / 12, abs=0.005)
