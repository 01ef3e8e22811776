"""Who watches shares what one of them asked."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from app.gateway.recent import RECENT_S, Recent


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_an_answer_holds_for_a_second_after_it_came() -> None:
    clock, asked = Clock(), iter(range(9))
    recent = Recent(clock)
    assert [recent.get("a", lambda: next(asked)) for _ in range(3)] == [0, 0, 0]
    assert recent.get("b", lambda: next(asked)) == 1
    clock.now_s = RECENT_S - 0.01
    assert recent.get("a", lambda: next(asked)) == 0
    clock.now_s = RECENT_S
    assert recent.get("a", lambda: next(asked)) == 2


def test_an_error_is_an_answer_too() -> None:
    clock = Clock()
    recent = Recent(clock)

    def away() -> int:
        raise ConnectionError("nobody listens")

    for ask in (away, lambda: 1):
        with pytest.raises(ConnectionError):
            recent.get("a", ask)
    clock.now_s = RECENT_S
    assert recent.get("a", lambda: 1) == 1


def test_those_who_come_while_it_is_asked_wait_for_the_same_answer() -> None:
    recent, asking, answered = Recent(), threading.Event(), threading.Event()

    def slowly() -> str:
        asking.set()
        assert answered.wait(10)
        return "first"

    with ThreadPoolExecutor() as threads:
        first = threads.submit(recent.get, "a", slowly)
        assert asking.wait(10)
        others = [threads.submit(recent.get, "a", lambda: "another") for _ in range(3)]
        answered.set()
        assert {each.result(10) for each in (first, *others)} == {"first"}
