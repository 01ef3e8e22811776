"""The manager over loopback: the transfer thread, its rows and its peers, with faults put in by hand."""

import random
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from relay.geometry import GeometryMismatch
from tests.kv import KVWorker, compute, destination, geometry, seal_of, until
from workers.engine.messages import Computed, Crashed
from workers.transfer import thread
from workers.transfer.backend import kv_manager
from workers.transfer.base import RowsExhausted, SendFailed, Sent, Settled
from workers.transfer.loopback import LoopbackTransport
from workers.transfer.manager import TransferManager
from workers.transfer.memory import KVMemory
from workers.transfer.peer import Peer
from workers.transfer.rows import Rows
from workers.transfer.transport import PeerLost, TransportError

SOURCE, TARGET = (3, 1, 4, 11, 5), (21, 22, 2, 9, 8)


class HeldTransport(LoopbackTransport):
    """Loopback whose writes land only when the test lets them, and fail when it says so."""

    let: ClassVar[threading.Semaphore]
    error: ClassVar[TransportError | None]
    posts: ClassVar[list[Any]]

    @classmethod
    def reset(cls) -> None:
        cls.let, cls.error, cls.posts = threading.Semaphore(0), None, []

    def post(self, handle: Any) -> bool:
        self.posts.append(handle)
        return False

    def check(self, handle: Any) -> bool:
        if not self.let.acquire(blocking=False):
            return False
        if self.error is not None:
            raise self.error
        return super().post(handle)


def held(boot: str, memory: KVMemory, rows: int, post_bytes: int, digest: bool) -> TransferManager:
    HeldTransport.reset()
    there, here = Rows(rows), Rows(rows)
    return TransferManager(boot, memory, there, here, HeldTransport(boot, memory, here), post_bytes, digest)


@pytest.fixture
def decode() -> Iterator[KVWorker]:
    worker = KVWorker("decode", geometry(pages=30), "loopback", seed=1)
    yield worker
    worker.manager.stop()


@pytest.fixture
def prefill() -> Iterator[KVWorker]:
    worker = KVWorker("prefill", geometry(pages=12), "loopback", seed=2)
    yield worker
    worker.manager.stop()


@pytest.fixture
def slow() -> Iterator[KVWorker]:
    """A prefill worker over HeldTransport, one block a post."""
    worker = KVWorker("slow", geometry(pages=12), "", seed=2, post_bytes=1, make=held)
    yield worker
    worker.manager.stop()


def send(prefill: KVWorker, decode: KVWorker) -> None:
    receiver = decode.manager.receiver(5)
    sender = prefill.manager.sender(5, "key", SOURCE)
    compute(sender, 5)
    sender.seal(seal_of(5, pages=5))
    sender.bootstrap(destination(decode, TARGET, receiver.row), *decode.address())
    assert isinstance(prefill.event(), Sent)


def test_pages_and_seal_arrive(prefill: KVWorker, decode: KVWorker) -> None:
    receiver = decode.manager.receiver(5)
    canaries = decode.others(TARGET)
    sender = prefill.manager.sender(5, "key", SOURCE)
    sender.computed(Computed("key", 0, 4, 0, 2))
    sender.bootstrap(destination(decode, TARGET, receiver.row), *decode.address())
    sender.computed(Computed("key", 0, 4, 2, 5))
    sender.seal(seal_of(5, pages=5))
    sent = prefill.event()
    assert isinstance(sent, Sent)
    assert sent.bytes == 5 * prefill.geometry.page_bytes
    assert sent.exposed_us >= 0
    assert decode.content(TARGET) == prefill.content(SOURCE)
    assert decode.others(TARGET) == canaries
    seal = receiver.read()
    assert seal is not None
    assert seal.digest != 0
    assert seal._replace(digest=0) == seal_of(5, pages=5)
    assert receiver.verify(seal, TARGET)
    decode.pool[2, TARGET[4], 17] ^= 1
    assert not receiver.verify(seal, TARGET)
    sender.close()
    assert prefill.event() == Settled(5)


@pytest.mark.parametrize("there", [1, 3, 5])
def test_only_what_the_peer_lacks_is_written(prefill: KVWorker, decode: KVWorker, there: int) -> None:
    """Its digest is over that: what the peer has it may have computed itself, to the last bit but one."""
    receiver = decode.manager.receiver(5)
    target = TARGET[there:]
    canaries = decode.others(target)
    sender = prefill.manager.sender(5, "key", SOURCE)
    sender.computed(Computed("key", 0, 4, 0, 2))
    sender.bootstrap(destination(decode, target, receiver.row, there), *decode.address())
    sender.computed(Computed("key", 0, 4, 2, 5))
    sender.seal(seal_of(5, pages=5))
    sent = prefill.event()
    assert isinstance(sent, Sent)
    page_bytes = prefill.geometry.page_bytes
    assert (sent.bytes, sent.spared_bytes) == ((5 - there) * page_bytes, there * page_bytes)
    assert decode.content(target) == prefill.content(SOURCE[there:])
    assert decode.others(target) == canaries
    seal = receiver.read()
    assert seal is not None
    assert seal._replace(digest=0) == seal_of(5, pages=5)
    assert receiver.verify(seal, target)
    assert receiver.verify(seal, TARGET) is False
    sender.close()
    assert prefill.event() == Settled(5)


def test_the_seal_is_invisible_until_every_page_is_done(slow: KVWorker, decode: KVWorker) -> None:
    receiver = decode.manager.receiver(5)
    sender = slow.manager.sender(5, "key", SOURCE)
    compute(sender, 5)
    sender.seal(seal_of(5, pages=5))
    sender.bootstrap(destination(decode, TARGET, receiver.row), *decode.address())
    until(lambda: len(HeldTransport.posts) == 20)
    for _ in range(20):
        assert receiver.read() is None
        HeldTransport.let.release()
    until(lambda: len(HeldTransport.posts) == 21)
    assert receiver.read() is None
    HeldTransport.let.release()
    assert isinstance(slow.event(), Sent)
    assert receiver.read() is not None


def test_close_stops_posts_and_settles_when_the_posted_are_done(slow: KVWorker, decode: KVWorker) -> None:
    sender = slow.manager.sender(5, "key", SOURCE)
    sender.bootstrap(destination(decode, TARGET, 0), *decode.address())
    sender.computed(Computed("key", 0, 1, 0, 5))
    until(lambda: len(HeldTransport.posts) == 5)
    sender.close()
    sender.computed(Computed("key", 1, 4, 0, 5))
    sender.seal(seal_of(5, pages=5))
    for _ in range(4):
        HeldTransport.let.release()
    assert slow.no_event(within_s=0.05)
    HeldTransport.let.release()
    assert slow.event() == Settled(5)
    assert len(HeldTransport.posts) == 5


def test_an_errored_room_never_settles_and_others_go_on(slow: KVWorker, decode: KVWorker) -> None:
    sender = slow.manager.sender(5, "key", SOURCE)
    sender.bootstrap(destination(decode, TARGET, 0), *decode.address())
    sender.computed(Computed("key", 0, 1, 0, 2))
    until(lambda: len(HeldTransport.posts) == 2)
    HeldTransport.error = TransportError("broken cable")
    HeldTransport.let.release()
    assert slow.event() == SendFailed(5, "broken cable")
    HeldTransport.error = None
    HeldTransport.let.release()
    sender.close()
    assert slow.no_event(within_s=0.05)
    other = slow.manager.sender(6, "other", SOURCE)
    HeldTransport.let.release(100)
    other.bootstrap(destination(decode, TARGET, 1), *decode.address())
    other.computed(Computed("other", 0, 4, 0, 5))
    other.seal(seal_of(6, pages=5))
    assert isinstance(slow.event(), Sent)


def test_a_lost_peer_is_connected_anew_by_the_next_room(slow: KVWorker, decode: KVWorker) -> None:
    first = slow.manager.sender(5, "key", SOURCE)
    first.bootstrap(destination(decode, TARGET, 0), *decode.address())
    first.computed(Computed("key", 0, 1, 0, 1))
    HeldTransport.error = PeerLost("cut")
    HeldTransport.let.release()
    assert slow.event() == SendFailed(5, "cut")
    HeldTransport.error = None
    second = slow.manager.sender(6, "key", SOURCE)
    HeldTransport.let.release(100)
    second.bootstrap(destination(decode, TARGET, 1), *decode.address())
    compute(second, 5)
    second.seal(seal_of(6, pages=5))
    assert isinstance(slow.event(), Sent)
    first.close()
    assert slow.no_event(within_s=0.05)


def test_a_write_that_never_lands_is_given_up_and_the_next_room_connects_anew(
    slow: KVWorker, decode: KVWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread, "STALL_S", 0.1)
    connected: list[str] = []
    connect = HeldTransport.connect

    def noted(self: HeldTransport, peer: Peer) -> None:
        connected.append(peer.boot)
        connect(self, peer)

    monkeypatch.setattr(HeldTransport, "connect", noted)
    late, stuck, next_one = (slow.manager.sender(room, "key", SOURCE) for room in (5, 6, 7))
    for sender, row in ((late, 0), (stuck, 1)):
        sender.bootstrap(destination(decode, TARGET, row), *decode.address())
        sender.computed(Computed("key", 0, 1, 0, 1))
    failed = [each for each in (slow.event(), slow.event()) if isinstance(each, SendFailed)]
    assert {each.room for each in failed} == {5, 6}
    assert all("decode worker decode has landed for 0.1 s" in each.error for each in failed)
    late.close()
    HeldTransport.let.release()  # the first that looks is the first room
    assert slow.event() == Settled(5)
    monkeypatch.setattr(thread, "STALL_S", 60.0)
    next_one.bootstrap(destination(decode, TARGET, 2), *decode.address())
    compute(next_one, 5)
    next_one.seal(seal_of(7, pages=5))
    HeldTransport.let.release(100)
    assert isinstance(slow.event(), Sent)
    assert connected == ["decode", "decode"]
    stuck.close()
    assert slow.no_event(within_s=0.05)


def test_a_landing_on_the_same_connection_is_a_sign_of_life(
    slow: KVWorker, decode: KVWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread, "STALL_S", 0.3)
    sender = slow.manager.sender(5, "key", SOURCE)
    sender.bootstrap(destination(decode, TARGET, 0), *decode.address())
    compute(sender, 5)
    sender.seal(seal_of(5, pages=5))
    until(lambda: len(HeldTransport.posts) == 20)
    for _ in range(20):  # all posted at once, and the last lands long after STALL_S
        assert slow.no_event(within_s=0.05)
        HeldTransport.let.release()
    HeldTransport.let.release()
    assert isinstance(slow.event(), Sent)


def test_forgetting_a_peer_fails_its_rooms_without_proof(slow: KVWorker, decode: KVWorker) -> None:
    sender = slow.manager.sender(5, "key", SOURCE)
    sender.bootstrap(destination(decode, TARGET, 0), *decode.address())
    sender.computed(Computed("key", 0, 1, 0, 1))
    until(lambda: HeldTransport.posts)
    slow.manager.forget_peer("decode")
    failed = slow.event()
    assert isinstance(failed, SendFailed)
    assert "decode" in failed.error
    HeldTransport.let.release(10)
    sender.close()
    assert slow.no_event(within_s=0.05)


def test_no_post_starts_after_the_deadline(slow: KVWorker, decode: KVWorker) -> None:
    slow.manager.posts_until(0.0)
    sender = slow.manager.sender(5, "key", SOURCE)
    HeldTransport.let.release(100)
    sender.bootstrap(destination(decode, TARGET, 0), *decode.address())
    compute(sender, 5)
    sender.seal(seal_of(5, pages=5))
    assert slow.no_event(within_s=0.05)
    assert not HeldTransport.posts
    slow.manager.posts_until(float("inf"))
    assert isinstance(slow.event(), Sent)


def test_seals_wait_for_a_source_row(decode: KVWorker) -> None:
    worker = KVWorker("narrow", geometry(pages=12), "", seed=2, rows=1, make=held)
    for room in (5, 6):
        sender = worker.manager.sender(room, "key", SOURCE)
        sender.bootstrap(destination(decode, TARGET, room), *decode.address())
        compute(sender, 5, group=4)
        sender.seal(seal_of(room, pages=5))
    HeldTransport.let.release(2)
    until(lambda: len(HeldTransport.posts) == 3, "the first row's post")
    assert worker.no_event(within_s=0.05)
    assert len(HeldTransport.posts) == 3
    HeldTransport.let.release(2)
    assert {type(worker.event()), type(worker.event())} == {Sent}
    worker.manager.stop()


def test_a_worker_of_another_geometry_is_refused(prefill: KVWorker) -> None:
    other = KVWorker("other", geometry(pages=30, page_size=8), "loopback", seed=1)
    sender = prefill.manager.sender(5, "key", SOURCE)
    with pytest.raises(GeometryMismatch, match="page_size"):
        sender.bootstrap(destination(other, TARGET, 0), *other.address())
    with pytest.raises(GeometryMismatch, match="one version"):
        sender.bootstrap(destination(other, TARGET, 0), b"junk", prefill.geometry)
    sender.close()
    assert prefill.event() == Settled(5)
    other.manager.stop()


def test_a_destination_of_another_boot_fails(prefill: KVWorker, decode: KVWorker) -> None:
    sender = prefill.manager.sender(5, "key", SOURCE)
    sender.bootstrap(destination(decode, TARGET, 0)._replace(boot="older"), *decode.address())
    failed = prefill.event()
    assert isinstance(failed, SendFailed)
    assert "older" in failed.error


def test_a_stopped_peer_is_lost(prefill: KVWorker, decode: KVWorker) -> None:
    address = decode.address()
    decode.manager.stop()
    sender = prefill.manager.sender(5, "key", SOURCE)
    sender.bootstrap(destination(decode, TARGET, 0), *address)
    assert isinstance(prefill.event(), SendFailed)
    sender.close()
    assert prefill.event() == Settled(5)


def test_a_peer_that_was_greeted_needs_no_other_handshake(prefill: KVWorker, decode: KVWorker) -> None:
    for _ in range(2):
        prefill.manager.greet_peer(*decode.address())
    until(lambda: prefill.manager.handshakes == (1, 0), "they are connected")
    send(prefill, decode)
    assert prefill.manager.handshakes == (1, 0)


def test_who_could_not_be_greeted_is_connected_by_the_first_room(prefill: KVWorker, decode: KVWorker) -> None:
    LoopbackTransport.living.discard(decode.boot)
    prefill.manager.greet_peer(*decode.address())
    until(lambda: prefill.manager.handshakes == (0, 1), "the greeting fails")
    LoopbackTransport.living.add(decode.boot)
    send(prefill, decode)
    assert prefill.manager.handshakes == (1, 1)


def test_a_greeting_waits_for_writes_in_flight(slow: KVWorker, decode: KVWorker, prefill: KVWorker) -> None:
    receiver = decode.manager.receiver(5)
    sender = slow.manager.sender(5, "key", SOURCE)
    compute(sender, 5)
    sender.bootstrap(destination(decode, TARGET, receiver.row), *decode.address())
    until(lambda: len(HeldTransport.posts) == 20)
    slow.manager.greet_peer(*prefill.address())
    for _ in range(20):
        HeldTransport.let.release()
        assert slow.manager.handshakes == (1, 0)
    until(lambda: slow.manager.handshakes == (2, 0), "nothing is in flight")


def test_the_dead_are_not_greeted(slow: KVWorker, decode: KVWorker, prefill: KVWorker) -> None:
    receiver = decode.manager.receiver(5)
    sender = slow.manager.sender(5, "key", SOURCE)
    compute(sender, 5)
    sender.bootstrap(destination(decode, TARGET, receiver.row), *decode.address())
    until(lambda: len(HeldTransport.posts) == 20)
    LoopbackTransport.living.discard(prefill.boot)
    slow.manager.greet_peer(*prefill.address())
    slow.manager.forget_peer(prefill.boot)
    third = KVWorker("third", geometry(pages=12), "loopback", seed=3)
    slow.manager.greet_peer(*third.address())
    HeldTransport.let.release(20)
    until(lambda: slow.manager.handshakes.ok == 2, "the third is greeted")
    assert slow.manager.handshakes.failed == 0
    third.manager.stop()


def test_rows_run_out_and_come_back_only_with_proof(decode: KVWorker) -> None:
    receivers = [decode.manager.receiver(room) for room in range(8)]
    assert len({receiver.row for receiver in receivers}) == 8
    with pytest.raises(RowsExhausted):
        decode.manager.receiver(8)
    receivers[3].release(quarantine=True)
    receivers[3].release(quarantine=False)
    with pytest.raises(RowsExhausted):
        decode.manager.receiver(8)
    decode.manager.proven(4)  # not quarantined: nothing to prove
    decode.manager.proven(3)
    decode.manager.proven(3)
    assert decode.manager.receiver(8).row == receivers[3].row
    with pytest.raises(RowsExhausted):
        decode.manager.receiver(9)
    receivers[5].release(quarantine=False)
    assert decode.manager.receiver(9).read() is None


def test_many_rooms_at_once_with_closes_at_random(prefill: KVWorker, decode: KVWorker) -> None:
    rng = random.Random(4)
    targets = np.array_split(np.random.default_rng(4).permutation(30), 6)
    for round_ in range(10):
        expected = {}
        for slot, target in enumerate(targets):
            room = round_ * 10 + slot
            source = rng.sample(range(12), len(target))
            receiver = decode.manager.receiver(room)
            sender = prefill.manager.sender(room, "key", source)
            sender.bootstrap(destination(decode, target.tolist(), receiver.row), *decode.address())
            compute(sender, len(target), group=rng.choice([1, 2, 4]))
            sender.seal(seal_of(room, len(target)))
            closed = rng.random() < 0.3
            if closed:
                sender.close()
            expected[room] = (sender, receiver, source, target, closed)
        open_rooms = {room for room, (*_, closed) in expected.items() if not closed}
        settled: set[int] = set()
        while open_rooms or len(settled) < len(expected):
            event = prefill.event()
            if isinstance(event, Settled):
                settled.add(event.room)
            else:
                assert isinstance(event, Sent)
                sender, receiver, source, target, _ = expected[event.room]
                assert decode.content(target.tolist()) == prefill.content(source)
                seal = receiver.read()
                assert seal is not None
                assert receiver.verify(seal, target.tolist())
                open_rooms.discard(event.room)
                sender.close()
        for _, receiver, *_ in expected.values():
            receiver.release(quarantine=False)


def test_a_bug_in_the_transfer_thread_is_told(prefill: KVWorker) -> None:
    prefill.manager.sender(5, "key", SOURCE)
    prefill.manager.sender(5, "key", SOURCE)
    crashed = prefill.event()
    assert isinstance(crashed, Crashed)
    assert "room 5" in str(crashed.error)


def test_an_unknown_backend_names_the_known(decode: KVWorker) -> None:
    with pytest.raises(ValueError, match="nixl, loopback"):
        kv_manager("rdma", "boot", decode.memory, rows=1, post_bytes=1 << 20)


def test_the_transport_begins_on_the_thread_that_posts() -> None:
    threads: dict[str, str] = {}

    class Noting(LoopbackTransport):
        def begin(self) -> None:
            threads["begin"] = threading.current_thread().name

        def progress(self) -> None:
            threads.setdefault("progress", threading.current_thread().name)

    def make(boot: str, memory: KVMemory, rows: int, post_bytes: int, digest: bool) -> TransferManager:
        there, here = Rows(rows), Rows(rows)
        transport = Noting(boot, memory, here)
        return TransferManager(boot, memory, there, here, transport, post_bytes, digest)

    worker = KVWorker("noting", geometry(8), "loopback", seed=1, make=make)
    worker.manager.sender(1, "key", (1,))  # any command
    until(lambda: "progress" in threads)
    worker.manager.stop()
    assert list(threads) == ["begin", "progress"]
    assert threads["begin"] == threads["progress"] == "transfer"
