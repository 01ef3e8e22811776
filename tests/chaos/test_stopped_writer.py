"""A prefill worker is stopped inside a post, loses its leases, and posts when it goes on."""

from typing import Any

import numpy as np

from relay.packed import unpack_ints
from relay.worker_card import WorkerCard
from tests.chaos.cluster import Cluster
from tests.chaos.faults import Fault, Kind, When
from tests.chaos.load import ANSWERED_S, Prompt, submit
from tests.chaos.watch import Text, Watch, compare, leaks, page_accounts
from tests.integration.until import until
from workers.transfer.peer import Peer

LONG_S = 600.0

Pool = np.ndarray[Any, np.dtype[np.uint8]]  # [layers, pages, bytes of a block]


def pool_bytes(card: WorkerCard) -> Pool:
    """A worker's KV pool as it is at this moment, from outside."""
    peer, geometry = Peer.unpack(card.agent_metadata), card.geometry
    size = geometry.layers * geometry.pages * geometry.layer_page_bytes
    with open(f"/proc/{card.incarnation.pid}/mem", "rb", buffering=0) as memory:
        memory.seek(peer.pool_address)
        content = bytearray(size)
        read = 0
        while read < size:
            read += memory.readinto(memoryview(content)[read:])
    return np.frombuffer(content, np.uint8).reshape(geometry.layers, geometry.pages, -1)


def changed_pages(before: Pool, after: Pool) -> set[int]:
    return set(np.flatnonzero((before != after).any(axis=(0, 2))).tolist())


def published_to(cluster: Cluster, writer: str, reader: str) -> set[int]:
    """Pages of `reader` that `writer` may still write: those of rooms that ended before their seal."""
    redis: Any = cluster.rooms.redis
    pages: set[int] = set()
    for key in cluster.keys("room:*"):
        room = redis.hgetall(key)
        if room.get(b"writer", b"").decode() == writer and room.get(b"peer", b"").decode() == reader:
            pages |= set(unpack_ints(room[b"pages"]))
    return pages


def quarantined(cluster: Cluster) -> int:
    return sum(account.quarantined for account in page_accounts(cluster))


def test_a_late_write_changes_no_page_of_another_request(
    cluster: Cluster, load: list[Prompt], expected: list[Text]
) -> None:
    fault = Fault(1, "prefill", Kind.STOP, "post", When.BEFORE, 3, LONG_S)
    cluster.arm([fault])
    ids = submit(cluster, load)
    watch = Watch(cluster, ids)
    stopped = cluster.wait_for(fault)
    ended = watch.all_ended(ANSWERED_S)
    assert not watch.problems
    assert not compare([ended[request_id] for request_id in ids], expected)

    until(lambda: not cluster.keys("lease"), "nothing is owned")
    until(lambda: quarantined(cluster) > 0, "what the stopped worker may write is in quarantine")
    readers = [card for card in cluster.cards() if card.role == "decode"]
    suspects = {card.boot: published_to(cluster, stopped.boot, card.boot) for card in readers}
    before = {card.boot: pool_bytes(card) for card in readers}

    cluster.resume(stopped)
    until(lambda: quarantined(cluster) == 0, "the writer has settled")
    late = {card.boot: changed_pages(before[card.boot], pool_bytes(card)) for card in readers}
    assert any(late.values()), "the stopped worker was meant to write late"
    for boot, pages in late.items():
        assert pages <= suspects[boot]

    again = submit(cluster, load)
    ended = Watch(cluster, again).all_ended(ANSWERED_S)
    assert not compare([ended[request_id] for request_id in again], expected)
    assert not leaks(cluster)
