"""KV by NIXL between real processes: what arrives, and what no exit may break."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from relay.geometry import Geometry, GeometryMismatch
from tests.kv import LAYERS, geometry, seal_of, until
from tests.kv_process import KVProcess
from workers.transfer.base import Destination, RowsExhausted, SendFailed, Sent, Settled
from workers.transfer.peer import Peer

Start = Callable[..., KVProcess]
TRANSPORTS = {"default": {}, "tcp": {"UCX_TLS": "tcp,self"}}


@pytest.fixture(params=TRANSPORTS)
def environment(request: pytest.FixtureRequest) -> dict[str, str]:
    return TRANSPORTS[request.param]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[KVProcess] = []

    def begin(boot: str, shape: Geometry, environment: dict[str, str], **kwargs: Any) -> KVProcess:
        started.append(KVProcess(boot, shape, environment, **kwargs))
        return started[-1]

    yield begin
    for process in started:
        process.kill()


def at(decode: KVProcess, pages: list[int], row: int, first_page: int = 0) -> Destination:
    return Destination(decode.boot, tuple(pages), row, nonce=99, first_page=first_page)


def picks(seed: int, pool_pages: int, count: int) -> list[int]:
    return [int(page) for page in np.random.default_rng(seed).permutation(pool_pages)[:count]]


def send_all(prefill: KVProcess, decode: KVProcess, room: int, source: list[int], target: list[int]) -> None:
    """One room from start to Settled; the bytes and the seal are checked."""
    row = decode.receive(room)
    prefill.send(room, source)
    prefill.bootstrap(room, at(decode, target, row), *decode.address())
    prefill.computed(room, 0, LAYERS, 0, len(source))
    prefill.seal(room, seal_of(room, len(source)))
    sent = prefill.event()
    assert isinstance(sent, Sent), sent
    assert decode.content(target) == prefill.content(source)
    assert decode.verify(room, target)
    decode.release(room, False)
    prefill.close(room)
    assert prefill.event() == Settled(room)


def test_a_peer_is_connected_before_there_is_something_to_send(
    start: Start, environment: dict[str, str]
) -> None:
    prefill = start("prefill", geometry(40), environment, seed=1)
    gone, stopped, decode = (start(boot, geometry(40), environment, seed=2) for boot in ("G", "S", "D"))
    addresses = [peer.address() for peer in (gone, stopped, decode)]
    gone.kill()
    stopped.freeze()
    for each in addresses:
        prefill.greet(*each)
    decode.be_greeted()
    until(lambda: sum(prefill.handshakes()) == 3, "all were met")
    source, target = picks(3, 40, 9), picks(4, 40, 9)
    send_all(prefill, decode, 5, source, target)
    send_all(prefill, decode, 6, source, target)
    assert sum(prefill.handshakes()) == 3


def test_random_pages_between_unequal_pools(start: Start, environment: dict[str, str]) -> None:
    """Groups computed before and after bootstrap; the row appears only at the end; nothing else changes."""
    prefill = start("prefill", geometry(40), environment, seed=1, post_bytes=64 << 10)
    decode = start("decode", geometry(70), environment, seed=2)
    source, target = picks(3, 40, 25), picks(4, 70, 27)  # two pages more for growth
    row = decode.receive(5)
    canaries = decode.others(target[:25])
    prefill.send(5, source)
    prefill.computed(5, 0, 2, 0, 20)
    prefill.bootstrap(5, at(decode, target, row), *decode.address())
    prefill.computed(5, 2, LAYERS, 0, 20)
    prefill.seal(5, seal_of(5, 25))
    until(lambda: decode.content(target[:20]) == prefill.content(source[:20]), "the first 20 pages")
    assert decode.read(5) is None
    prefill.computed(5, 0, LAYERS, 20, 25)
    sent = prefill.event()
    assert isinstance(sent, Sent)
    assert sent.bytes == 25 * geometry(40).page_bytes
    assert decode.content(target[:25]) == prefill.content(source)
    assert decode.others(target[:25]) == canaries
    assert decode.read(5)._replace(digest=0) == seal_of(5, 25)
    assert decode.verify(5, target[:25])
    prefill.close(5)
    assert prefill.event() == Settled(5)


@pytest.mark.parametrize("there", [7, 25])
def test_only_what_the_peer_lacks_travels(start: Start, environment: dict[str, str], there: int) -> None:
    prefill = start("prefill", geometry(40), environment, seed=1)
    decode = start("decode", geometry(60), environment, seed=2)
    source, target = picks(3, 40, 25), picks(4, 60, 25)[there:]
    canaries, row = decode.others(target), decode.receive(5)
    prefill.send(5, source)
    prefill.computed(5, 0, LAYERS, 0, 10)
    prefill.bootstrap(5, at(decode, target, row, there), *decode.address())
    prefill.computed(5, 0, LAYERS, 10, 25)
    prefill.seal(5, seal_of(5, 25))
    sent = prefill.event()
    assert isinstance(sent, Sent)
    page_bytes = geometry(40).page_bytes
    assert (sent.bytes, sent.spared_bytes) == ((25 - there) * page_bytes, there * page_bytes)
    assert decode.content(target) == prefill.content(source[there:])
    assert decode.others(target) == canaries
    assert decode.verify(5, target)
    prefill.close(5)
    assert prefill.event() == Settled(5)


def test_close_in_mid_transfer(start: Start, environment: dict[str, str]) -> None:
    """Settled comes when what was posted is DONE; what was not posted never lands."""
    prefill = start("prefill", geometry(40), environment, seed=1)
    decode = start("decode", geometry(40), environment, seed=2)
    pages = picks(3, 40, 20)
    row, address = decode.receive(5), decode.address()
    canaries, before = decode.others(pages), decode.block(3, pages[0])
    decode.freeze()  # a peer that has never answered: the handle stays in PROC
    prefill.send(5, pages)
    prefill.bootstrap(5, at(decode, pages, row), *address)
    prefill.computed(5, 0, 3, 0, 20)
    assert prefill.no_event(0.2)
    prefill.close(5)
    assert prefill.no_event(0.2), "settled while a handle is in flight"
    prefill.computed(5, 3, LAYERS, 0, 20)
    prefill.seal(5, seal_of(5, 20))
    decode.thaw()
    decode.release(5, True)
    assert prefill.event() == Settled(5)
    after = decode.content(pages)
    others = [page for page in range(40) if page not in pages]
    send_all(prefill, decode, 6, pages[:10], others[:10])
    assert decode.content(pages) == after
    assert decode.block(3, pages[0]) == before
    assert decode.read_row(row) is None
    assert canaries != decode.others(pages)  # room 6 wrote there, so the canaries can fail


def test_the_peer_is_killed_in_mid_transfer(start: Start, environment: dict[str, str]) -> None:
    """The room fails and never settles; another peer is served, and so is the restarted one."""
    big = geometry(24, page_size=512)  # 256 KiB a block
    prefill = start("prefill", big, environment, seed=1, post_bytes=64 << 20)
    decode = start("decode", big, environment, seed=2)
    pages = list(range(24))
    row, address = decode.receive(5), decode.address()
    prefill.send(5, pages)
    prefill.bootstrap(5, at(decode, pages, row), *address)
    prefill.computed(5, 0, 1, 0, 1)
    until(lambda: decode.block(0, 0) == prefill.block(0, 0), "the first block")
    decode.freeze()
    prefill.computed(5, 1, LAYERS, 0, 24)
    prefill.seal(5, seal_of(5, 24))
    assert prefill.no_event(0.2)
    decode.kill()
    failed = prefill.event()
    assert isinstance(failed, SendFailed)
    assert failed.room == 5
    prefill.close(5)
    assert prefill.no_event(0.3)
    other = start("other", big, environment, seed=3)
    send_all(prefill, other, 6, pages[:5], pages[5:10])
    prefill.forget("decode")
    restarted = start("decode-2", big, environment, seed=4)
    send_all(prefill, restarted, 7, pages[:5], pages[5:10])
    send_all(prefill, other, 8, pages[:5], pages[10:15])
    assert prefill.no_event(0.0)


def test_a_cut_connection_fails_its_room_and_the_next_room_connects_anew(start: Start) -> None:
    prefill = start("prefill", geometry(40), TRANSPORTS["tcp"], seed=1)
    decode = start("decode", geometry(40), TRANSPORTS["tcp"], seed=2)
    pages, others = picks(3, 40, 8), picks(4, 40, 8)
    send_all(prefill, decode, 5, pages, others)
    row = decode.receive(6)
    prefill.send(6, pages)
    prefill.bootstrap(6, at(decode, others, row), *decode.address())
    assert prefill.cut_connections() > 0
    prefill.computed(6, 0, LAYERS, 0, 8)
    failed = prefill.event()
    assert isinstance(failed, SendFailed)
    assert failed.room == 6
    prefill.close(6)
    send_all(prefill, decode, 7, pages, picks(5, 40, 8))
    assert prefill.no_event(0.0)


def test_bootstrap_towards_a_dead_peer_fails(start: Start, environment: dict[str, str]) -> None:
    prefill = start("prefill", geometry(40), environment, seed=1)
    decode = start("decode", geometry(40), environment, seed=2)
    pages, row, address = picks(3, 40, 8), decode.receive(5), decode.address()
    decode.kill()
    prefill.send(5, pages)
    prefill.bootstrap(5, at(decode, pages, row), *address)
    prefill.computed(5, 0, LAYERS, 0, 8)
    assert isinstance(prefill.event(), SendFailed)
    other = start("other", geometry(40), environment, seed=3)
    send_all(prefill, other, 6, pages, pages)


def test_the_writer_is_stopped_inside_a_post(start: Start) -> None:
    """It goes on writing after the room has ended: into the room's own pages, which are still quarantined."""
    shape = geometry(96, page_size=1024)  # 512 KiB a block, 192 MiB a pool
    prefill = start("prefill", shape, {}, seed=1, post_bytes=256 << 20)
    decode = start("decode", shape, {}, seed=2, rows=1)
    own, last = list(range(8, 88)), (LAYERS - 1, 87)
    canaries = decode.others(own)
    for room in range(5, 15):
        row = decode.receive(room)
        first = decode.block(0, 8)
        at_end = decode.block(*last)
        prefill.send(room, own)
        prefill.bootstrap(room, at(decode, own, row), *decode.address())
        prefill.computed(room, 0, LAYERS, 0, 80)
        until(partial(decode.differs, 0, 8, first), "the first block")
        prefill.freeze()
        caught = not decode.differs(*last, at_end)
        decode.release(room, True)
        with pytest.raises(RowsExhausted):
            decode.receive(99)
        prefill.thaw()
        prefill.close(room)
        assert prefill.event() == Settled(room)
        assert decode.checksum(own) == prefill.checksum(own), "a post that began is written to its end"
        assert decode.others(own) == canaries
        decode.proven(room)
        if caught:
            return
        prefill.refill(room)
    pytest.fail("the writer was never stopped inside a post")


def test_stop_does_not_wait_for_a_silent_peer(start: Start) -> None:
    environment = TRANSPORTS["tcp"]
    prefill = start("prefill", geometry(40), environment, seed=1)
    decode = start("decode", geometry(40), environment, seed=2)
    pages, row, address = picks(3, 40, 20), decode.receive(5), decode.address()
    decode.freeze()
    prefill.send(5, pages)
    prefill.bootstrap(5, at(decode, pages, row), *address)
    prefill.computed(5, 0, LAYERS, 0, 20)
    assert prefill.no_event(0.2)
    assert prefill.stop() is None


def test_strangers_are_refused_and_the_manager_lives(start: Start) -> None:
    prefill = start("prefill", geometry(40), {}, seed=1)
    decode = start("decode", geometry(40), {}, seed=2)
    metadata, shape = decode.address()
    known = Peer.unpack(metadata)
    prefill.send(5, [1, 2])
    with pytest.raises(GeometryMismatch, match="page_size"):
        prefill.bootstrap(5, at(decode, [3, 4], 0), metadata, geometry(40, page_size=8))
    for room, stranger in enumerate(
        (
            known._replace(contact=b"no NIXL agent"),
            known._replace(boot="stranger"),
            known._replace(pool_address=known.pool_address + (1 << 40)),
        ),
        start=10,
    ):
        prefill.send(room, [1, 2])
        prefill.bootstrap(room, Destination(stranger.boot, (3, 4), 0, 99), stranger.pack(), shape)
        prefill.computed(room, 0, LAYERS, 0, 2)
        failed = prefill.event()
        assert isinstance(failed, SendFailed)
        assert failed.room == room
        prefill.close(room)
        assert prefill.event() == Settled(room)
    send_all(prefill, decode, 20, [1, 2], [3, 4])
