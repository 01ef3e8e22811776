"""Doorbells that came in and have not become legs yet."""

from collections import deque

from workers.doorbell import Doorbell, TaskHandle

RETRY_S = 0.05


class Credits:
    """Each is worth one claim. What cannot claim now, for lack of pages, is held and tried again."""

    def __init__(self) -> None:
        self._bells: deque[Doorbell] = deque()
        self._retry_at = 0.0

    def __len__(self) -> int:
        return len(self._bells)

    @property
    def first(self) -> Doorbell:
        return self._bells[0]

    def add(self, bell: Doorbell) -> None:
        self._bells.append(bell)
        self._retry_at = 0.0

    def remove(self, bell: Doorbell) -> None:
        self._bells.remove(bell)

    def trim(self, waiting: int) -> list[Doorbell]:
        """Keep as many as there are legs that wait; the oldest of the others are given up."""
        return [self._bells.popleft() for _ in range(len(self._bells) - waiting)]

    def clear(self) -> list[Doorbell]:
        return self.trim(0)

    def due(self, now: float) -> bool:
        return bool(self._bells) and now >= self._retry_at

    def wait(self, now: float) -> None:
        self._retry_at = now + RETRY_S

    def request_of(self, task: TaskHandle) -> str | None:
        return next((bell.request_id for bell in self._bells if bell.task is task), None)
