"""What took a while, piece by piece, in bounded space."""

from typing import NamedTuple

MOST_STRETCHES = 64


class Stretch(NamedTuple):
    """A chunk of `amount` tokens, or a write of `amount` bytes of layers [first_layer, last_layer): of none,
    it was the row that seals the room. `joined`: how many pieces this stands for."""

    start: float
    end: float
    amount: int
    first_layer: int = 0
    last_layer: int = 0
    joined: int = 1

    def join(self, next_one: "Stretch") -> "Stretch":
        return Stretch(
            min(self.start, next_one.start),
            max(self.end, next_one.end),
            self.amount + next_one.amount,
            min(self.first_layer, next_one.first_layer),
            max(self.last_layer, next_one.last_layer),
            self.joined + next_one.joined,
        )


class Stretches:
    """In the order they are added. Beyond `most` neighbours are joined: the whole stays in sight, at half the
    detail."""

    def __init__(self, most: int = MOST_STRETCHES) -> None:
        self._most = most
        self._pieces_each = 1
        self._all: list[Stretch] = []

    def add(self, piece: Stretch) -> None:
        if self._all and self._all[-1].joined < self._pieces_each:
            self._all[-1] = self._all[-1].join(piece)
            return
        if len(self._all) == self._most:
            pairs = zip(self._all[::2], self._all[1::2], strict=True)
            self._all = [first.join(second) for first, second in pairs]
            self._pieces_each *= 2
        self._all.append(piece)

    @property
    def all(self) -> tuple[Stretch, ...]:
        return tuple(self._all)
