"""The cards of other workers: read once, forgotten only when their process is proven gone."""

from relay.worker_card import WorkerCard
from tests.desk import card, kill
from workers.peers import Peers


class Directory:
    def __init__(self, *cards: WorkerCard) -> None:
        self.cards = list(cards)
        self.reads = 0

    def read(self) -> list[WorkerCard]:
        self.reads += 1
        return self.cards


def test_a_card_is_read_once() -> None:
    directory = Directory(card("D1"), card("D2"))
    peers = Peers(directory.read, [].append)
    for _ in range(3):
        assert peers.card("D1") == directory.cards[0]
        assert peers.card("D2") == directory.cards[1]
    assert directory.reads == 1


def test_who_is_not_there_is_asked_for_again() -> None:
    directory = Directory()
    peers = Peers(directory.read, [].append)
    assert peers.card("D1") is None
    directory.cards.append(card("D1"))
    assert peers.card("D1") is not None


def test_the_dead_are_forgotten_when_a_new_one_appears() -> None:
    forgotten: list[str] = []
    directory = Directory(kill(card("D1")), card("D2"))
    peers = Peers(directory.read, forgotten.append)
    assert peers.card("D1") is not None
    directory.cards = [card("D3")]
    assert peers.restarts == 0
    assert peers.card("D3") is not None
    assert peers.restarts == 1, "it has the name of one that was known"
    # D2's card is gone too, but its process lives: it may only have lost its server.
    assert forgotten == ["D1"]
    assert peers.card("D2") is not None
    assert peers.card("D1") is None
