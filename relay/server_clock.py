"""The time of the Redis server, as a process knows it that asked once."""

from typing import NamedTuple


class ServerClock(NamedTuple):
    """At `at_s` (monotonic seconds) an answer came that the server gave at `server_ms`.

    Every moment is told too early by the time that answer took, and never too late: what is done between two
    answers lies between their stamps, whatever the clocks of the hosts say.
    """

    server_ms: float
    at_s: float

    def ms(self, moment_s: float) -> float:
        """Monotonic seconds of this process as ms of the server since the epoch."""
        return self.server_ms + (moment_s - self.at_s) * 1e3
