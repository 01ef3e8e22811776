"""The cards of the other workers, as they are needed."""

from collections.abc import Callable

from relay.worker_card import WorkerCard


class Peers:
    """A card never changes during an incarnation's life, but for its load, so it is read once."""

    def __init__(self, workers: Callable[[], list[WorkerCard]], forget: Callable[[str], None]) -> None:
        """`workers` reads the live cards, `forget` drops what the transport keeps about a dead one."""
        self._workers = workers
        self._forget = forget
        self._cards: dict[str, WorkerCard] = {}
        self.restarts = 0

    def card(self, boot: str) -> WorkerCard | None:
        """None when it is not alive, or cannot be read now."""
        if boot not in self._cards:
            self._refresh()
        return self._cards.get(boot)

    def _refresh(self) -> None:
        """A new incarnation has appeared somewhere: a good moment to let go of the dead ones."""
        alive = {card.boot: card for card in self._workers()}
        known = {card.name for card in self._cards.values()}
        self.restarts += sum(boot not in self._cards and card.name in known for boot, card in alive.items())
        for boot, card in list(self._cards.items()):
            if boot not in alive and card.incarnation.proven_dead():
                del self._cards[boot]
                self._forget(boot)
        self._cards |= alive
