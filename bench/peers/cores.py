"""The cores that every system gets in its turn."""

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cores:
    numbers: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> "Cores":
        """`0,1`; empty: all that may be used. Raises ValueError."""
        if not text:
            return cls(tuple(sorted(os.sched_getaffinity(0))))
        return cls(tuple(int(part) for part in text.split(",")))

    def halves(self) -> tuple["Cores", "Cores"]:
        """For two workers; with one core, both on it."""
        middle = max(1, len(self.numbers) // 2)
        return Cores(self.numbers[:middle]), Cores(self.numbers[middle:] or self.numbers)

    def __str__(self) -> str:
        return ",".join(map(str, self.numbers))

    def __len__(self) -> int:
        return len(self.numbers)
