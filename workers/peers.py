"""The cards of the other workers, as they are needed."""

from collections.abc import Callable, Collection

from relay.worker_card import WorkerCard


class Peers:
    """A card never changes during an incarnation's life, but for its load, so it is read once."""

    def __init__(self, workers: Callable[[], list[WorkerCard]], forget: Callable[[str], None]) -> None:
        """`workers` reads the live cards, `forget` drops what the transport keeps about a dead one."""
        self._workers = workers
        self._forget = forget
        self._cards: dict[str, WorkerCard] = {}
        self._names: set[str] = set()  # of all that were ever known
        self._told: set[str] = set()
        self.restarts = 0

    def card(self, boot: str) -> WorkerCard | None:
        """None when it is not alive, or cannot be read now."""
        if boot not in self._cards:
            self._refresh()
        return self._cards.get(boot)

    def news(self, alive: Collection[str]) -> list[WorkerCard]:
        """The cards of those boots that were not there the last time. Raises what `workers` does; then they
        are news to the next call."""
        new = [boot for boot in alive if boot not in self._told]
        if new:
            self._refresh()
        self._let_go(alive)
        self._told = set(alive)
        return [self._cards[boot] for boot in new if boot in self._cards]

    def _refresh(self) -> None:
        alive = {card.boot: card for card in self._workers()}
        new = [card for boot, card in alive.items() if boot not in self._cards]
        self.restarts += sum(card.name in self._names for card in new)
        self._names |= {card.name for card in new}
        self._let_go(alive)
        self._cards |= alive

    def _let_go(self, alive: Collection[str]) -> None:
        """Whoever is not there may only have lost its server: what counts is the death of its process."""
        for boot, card in list(self._cards.items()):
            if boot not in alive and card.incarnation.proven_dead():
                del self._cards[boot]
                self._forget(boot)
