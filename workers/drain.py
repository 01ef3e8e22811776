"""The end of a worker: when it stops claiming, when it hands back what still runs, and when it just goes."""

HAND_BACK_S = 4.0  # for what is handed back to be emitted, settled and released


class Drain:
    """Begun and moved on by the control thread; times are monotonic seconds."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._hand_back_at: float | None = None
        self._handed_back = False

    @property
    def begun(self) -> bool:
        return self._hand_back_at is not None

    def begin(self, now: float) -> None:
        if self._hand_back_at is None:
            self._hand_back_at = now + self._grace_s

    def hurry(self, now: float) -> None:
        """Hand back now."""
        self._hand_back_at = now if self._hand_back_at is None else min(now, self._hand_back_at)

    def hands_back(self, now: float) -> bool:
        """True once: the grace period is over."""
        if self._handed_back or self._hand_back_at is None or now < self._hand_back_at:
            return False
        self._handed_back = True
        return True

    def over(self, now: float) -> bool:
        """What is left (a send that ended in an error, calls to a server that is away) ends with the
        process."""
        return self._hand_back_at is not None and now > self._hand_back_at + HAND_BACK_S
