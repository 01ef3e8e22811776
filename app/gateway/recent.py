"""Answers that may be a second old: whoever watches, and however many do, Redis is asked once."""

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flask import request

Answer = TypeVar("Answer")

RECENT_S = 1.0


def is_watching() -> bool:
    """Whether this request takes an answer that is a second old: who asks each second says so."""
    return (request.cache_control.max_age or 0) >= RECENT_S


@dataclass(slots=True)
class _Asked:
    answer: Future[Any] = field(default_factory=Future)
    until_s: float | None = None  # None: the answer is not there yet


class Recent:
    """Thread-safe. Who asks while another one does shares its answer, also when that is an error."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._asked: dict[Hashable, _Asked] = {}

    def get(self, key: Hashable, ask: Callable[[], Answer]) -> Answer:
        """What `ask` says, or said within the last second for an equal `key`. Raises what it raises."""
        with self._lock:
            known = self._known(key)
            if known is None:
                mine = self._asked[key] = _Asked()
        if known is not None:
            found: Answer = known.answer.result()
            return found
        try:
            mine.answer.set_result(ask())
        except BaseException as error:
            mine.answer.set_exception(error)
        mine.until_s = self._clock() + RECENT_S
        answered: Answer = mine.answer.result()
        return answered

    def _known(self, key: Hashable) -> _Asked | None:
        """With what is too old forgotten."""
        now = self._clock()
        self._asked = {k: a for k, a in self._asked.items() if a.until_s is None or now < a.until_s}
        return self._asked.get(key)
