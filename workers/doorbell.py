"""What the Celery pool hands to the control thread, and how the control thread ends the Celery task."""

from typing import NamedTuple, Protocol

from relay.request import Leg


class TaskHandle(Protocol):
    """A Celery task that stays STARTED until one of these is called, once, from any thread."""

    def succeed(self, result: str) -> None: ...

    def fail(self, error: str) -> None: ...

    def fork(self, request_id: str) -> "TaskHandle":
        """A task beside this one, for a leg that this worker takes without a doorbell from the broker."""


class Doorbell(NamedTuple):
    """A credit to claim one leg. It names a request, so that Flower can show one. `rung_at`: when it was
    sent, seconds since the epoch by the sender's clock; 0: it does not say."""

    request_id: str
    leg: Leg
    task: TaskHandle
    rung_at: float = 0.0
