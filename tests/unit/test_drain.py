"""The end of a worker: finish, then hand back, then go."""

from workers.drain import HAND_BACK_S, Drain


def test_nothing_happens_before_it_begins() -> None:
    drain = Drain(grace_s=30)
    assert not drain.begun
    assert not drain.hands_back(1e9)
    assert not drain.over(1e9)


def test_what_runs_is_handed_back_once_after_the_grace_period() -> None:
    drain = Drain(grace_s=30)
    drain.begin(100.0)
    drain.begin(120.0)
    assert drain.begun
    assert not drain.hands_back(129.9)
    assert drain.hands_back(130.0)
    assert not drain.hands_back(131.0)
    assert not drain.over(130.0 + HAND_BACK_S)
    assert drain.over(130.1 + HAND_BACK_S)


def test_a_hurried_drain_hands_back_now() -> None:
    drain = Drain(grace_s=30)
    drain.begin(100.0)
    drain.hurry(105.0)
    assert drain.hands_back(105.0)
    drain.hurry(108.0)
    assert not drain.hands_back(108.0)
    assert drain.over(105.1 + HAND_BACK_S)
