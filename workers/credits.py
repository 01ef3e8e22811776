"""Doorbells that came in and have not become legs yet."""

from collections import deque
from math import inf

from workers.doorbell import Doorbell, TaskHandle

RETRY_S = 0.05


class Credits:
    """Each is worth one claim. What cannot claim now, for lack of pages, is held and tried again."""

    def __init__(self) -> None:
        self._bells: deque[Doorbell] = deque()
        self._retry_at = 0.0

    def __len__(self) -> int:
        return len(self._bells)

    def add(self, bell: Doorbell) -> None:
        self._bells.append(bell)
        self._retry_at = 0.0

    def due(self, now: float) -> bool:
        return bool(self._bells) and now >= self._retry_at

    def retry_s(self, now: float) -> float:
        """In how many seconds one is due; inf if none is held, or it is due."""
        return self._retry_at - now if self._bells and now < self._retry_at else inf

    def take(self) -> Doorbell:
        """The oldest, which is due; it comes back by `put_back` if it cannot claim."""
        return self._bells.popleft()

    def put_back(self, bell: Doorbell, now: float, wait_s: float = RETRY_S) -> None:
        self._bells.appendleft(bell)
        self.wait(now, wait_s)

    def wait(self, now: float, wait_s: float = RETRY_S) -> None:
        """Nothing can be claimed now; try again in a moment."""
        self._retry_at = now + wait_s

    def trim(self, waiting: int) -> list[Doorbell]:
        """Keep as many as there are legs that wait; the oldest of the others are given up."""
        return [self._bells.popleft() for _ in range(len(self._bells) - waiting)]

    def request_of(self, task: TaskHandle) -> str | None:
        return next((bell.request_id for bell in self._bells if bell.task is task), None)
