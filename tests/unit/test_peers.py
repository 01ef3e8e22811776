"""The cards of other workers: read once, forgotten only when their process is proven gone."""

import pytest
from redis.exceptions import ConnectionError

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


def forget_nothing(boot: str) -> None:
    pass


def test_a_card_is_read_once() -> None:
    directory = Directory(card("D1"), card("D2"))
    peers = Peers(directory.read, forget_nothing)
    for _ in range(3):
        assert peers.card("D1") == directory.cards[0]
        assert peers.card("D2") == directory.cards[1]
    assert directory.reads == 1


def test_who_is_not_there_is_asked_for_again() -> None:
    directory = Directory()
    peers = Peers(directory.read, forget_nothing)
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


def test_who_appears_is_told_once() -> None:
    directory = Directory(card("D1"))
    peers = Peers(directory.read, forget_nothing)
    assert peers.card("D1") is not None
    assert peers.news(["D1"]) == directory.cards
    assert peers.news(["D1"]) == []
    assert directory.reads == 2
    assert peers.news(["D1", "D2"]) == [], "its card has not come, or has gone already"
    directory.cards.append(card("D3"))
    assert peers.news(["D1", "D3"]) == [card("D3")]
    assert peers.news([]) == []
    assert peers.news(["D1"]) == [card("D1")], "it was away"


def test_what_could_not_be_read_is_still_news() -> None:
    directory = Directory(card("D1"))
    away = True

    def read() -> list[WorkerCard]:
        if away:
            raise ConnectionError("nobody listens")
        return directory.read()

    peers = Peers(read, forget_nothing)
    with pytest.raises(ConnectionError):
        peers.news(["D1"])
    away = False
    assert peers.news(["D1"]) == [card("D1")]


def test_the_dead_are_forgotten_when_they_are_missing() -> None:
    forgotten: list[str] = []
    directory = Directory(kill(card("D1")), card("D2"))
    peers = Peers(directory.read, forgotten.append)
    peers.news(["D1", "D2"])
    assert forgotten == []
    peers.news([])
    assert forgotten == ["D1"], "D2 lives"
    directory.cards = [card("D3")]
    peers.news(["D3"])
    assert peers.restarts == 1, "it has the name of D1"
