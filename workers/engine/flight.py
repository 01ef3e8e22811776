"""A step that was launched and whose tokens were not read."""

from collections.abc import Sequence
from typing import NamedTuple

from workers.engine.batch import Drawn, Row
from workers.engine.choice import Choice


class Flight(NamedTuple):
    rows: Sequence[Row]
    choice: Choice

    @property
    def tokens(self) -> int:
        return sum(row.query_tokens for row in self.rows)

    @property
    def drawn(self) -> Drawn | None:
        """What the next step may be launched with; None: the choice must be read first."""
        ids = self.choice.ids
        return None if ids is None else Drawn([row.sequence for row in self.rows if row.samples], ids)
