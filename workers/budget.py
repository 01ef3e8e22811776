"""How many tokens a new leg may need: the engine's last word, less what the engine has not seen yet."""

from collections import deque
from collections.abc import Callable

from workers.engine.messages import Command, Headroom, Prefill, Reserve


class Budget:
    """Owned by the control thread, which alone sends admissions to the engine."""

    def __init__(self, headroom: Callable[[], Headroom]) -> None:
        self._headroom = headroom
        self._admissions = 0
        self._unseen: deque[tuple[int, int]] = deque()  # (index of an admission, its tokens)

    @property
    def free_tokens(self) -> int:
        headroom = self._headroom()
        while self._unseen and self._unseen[0][0] <= headroom.admitted:
            self._unseen.popleft()
        return headroom.free_tokens - sum(tokens for _, tokens in self._unseen)

    def count(self, command: Command) -> None:
        """A command is on its way to the engine."""
        match command:
            case Prefill() | Reserve():
                tokens = len(command.work.prompt_ids) + len(command.work.emitted) + 1
            case _:
                return
        self._admissions += 1
        self._unseen.append((self._admissions, tokens))
