"""A server that is full, away, slow, emptied, of another version, or that lost its last second."""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from relay.answers import EmitOutcome, Emitted, SubmitOutcome
from relay.functions import UnsupportedServer
from relay.mailbox import Ended
from relay.protocol import PROTOCOL
from relay.request import Finish, Leg, State, Why
from relay.rooms import Rooms
from relay.tokens import TokenReader
from tests.integration.scene import (
    LOAD,
    LONG_MS,
    PREFILLED,
    TRANSFER,
    Scene,
    card,
    check_integrity,
    claim,
    submission,
    tokens,
)
from tests.servers import RedisServer, redis_binary, valkey_binary


@pytest.fixture
def own_server(server_binary: Path, tmp_path: Path) -> Iterator[RedisServer]:
    """Everything acknowledged is on disk, so a copy of its directory is a moment to go back to."""
    with RedisServer(server_binary, tmp_path / "data", append_fsync="always") as server:
        yield server


@pytest.fixture
def rooms(own_server: RedisServer) -> Iterator[Rooms]:
    client = Rooms(own_server.url, "m")
    yield client
    client.close()


@pytest.fixture
def scene(rooms: Rooms, own_server: RedisServer) -> Scene:
    return Scene(rooms, own_server, "m")


def state_of(scene: Scene) -> str:
    view = scene.view()
    assert view
    return view.state


# Full


def test_a_full_server_takes_no_new_request_but_ends_the_open_ones(
    rooms: Rooms, own_server: RedisServer
) -> None:
    scenes = {}
    for place in ("queued", "open", "reserved", "published", "ready", "decode", "unified"):
        scenes[place] = Scene(rooms, own_server, "m")
        scenes[place].reach(place)
        if place == "queued":
            rooms.cancel(scenes[place].id)  # so that the next ones do not claim it
    redis: Any = rooms.redis
    redis.config_set("maxmemory", "1mb")
    with pytest.raises(OutOfMemoryError):
        redis.set("x", "y")

    assert rooms.submit(submission("req_f"))[:3] == (SubmitOutcome.FULL, "req_f", [])
    assert rooms.record("req_f") is None
    assert claim(rooms, Leg.DECODE, "D", wanted=scenes["open"].id)
    s = scenes["reserved"]
    assert rooms.publish(s.d, s.room, [1], 0).ok
    s = scenes["published"]
    assert rooms.kv_ready(s.p, s.room, PREFILLED, TRANSFER).ok
    assert scenes["ready"].emit(0, 5) is EmitOutcome.OK
    assert scenes["decode"].emit(2, 1, Finish("stop")) is EmitOutcome.DONE
    assert scenes["unified"].release(Leg.DECODE, Why.DRAIN)
    assert claim(rooms, Leg.PREFILL, "P2", wanted=scenes["unified"].id)
    assert rooms.fail(s.d, "error", "Out of luck.").ok
    rooms.register(card("P"))
    assert rooms.renew("P", LOAD, [], LONG_MS).known
    rooms.ask("P", 1, "D")
    rooms.settle(1, "D")
    rooms.reap(0, 3)
    for s in scenes.values():
        record = rooms.cancel(s.id).record
        assert record
        assert record.state.terminal
    check_integrity(rooms)
    assert rooms.list_requests(20)
    redis.config_set("maxmemory", "0")
    assert rooms.submit(submission()).outcome is SubmitOutcome.NEW


# Away, or slow


def test_away_is_an_error_and_back_is_back(rooms: Rooms, own_server: RedisServer) -> None:
    rooms.submit(submission("req_a"))
    own_server.kill()
    with pytest.raises(RedisConnectionError):
        rooms.record("req_a")
    with pytest.raises(RedisConnectionError):
        rooms.submit(submission())
    own_server.start()
    record = rooms.record("req_a")
    assert record
    assert record.state is State.QUEUED


def test_a_server_that_may_not_write_now_counts_as_away(rooms: Rooms, own_server: RedisServer) -> None:
    with own_server.client() as admin:
        admin.config_set("min-replicas-to-write", 1)
        with pytest.raises(RedisConnectionError, match="NOREPLICAS"):
            rooms.submit(submission("req_a"))
        admin.config_set("min-replicas-to-write", 0)
    assert rooms.submit(submission("req_a")).outcome is SubmitOutcome.NEW


def test_calls_that_redis_py_repeats_count_once(rooms: Rooms, own_server: RedisServer) -> None:
    """The server stands still for longer than a client waits, then runs both the call and its repeat."""
    scene = Scene(rooms, own_server, "m")
    scene.reach("unified")
    gateway = Rooms(own_server.url, "m")
    assert gateway.record("req_other") is None  # so that it is connected
    other = submission("req_other")

    def calls_seen() -> int:
        stats: Any = rooms.redis.info("commandstats")
        return int(stats["cmdstat_fcall"]["calls"])

    before = calls_seen()
    answers: list[Any] = []

    def emit() -> None:
        answers.append(scene.emit(0, 2))

    def submit() -> None:
        answers.append(gateway.submit(other).outcome)

    process = own_server.process_id
    os.kill(process, signal.SIGSTOP)
    threads = [threading.Thread(target=target) for target in (emit, submit)]
    for thread in threads:
        thread.start()
    time.sleep(2.5)  # longer than the socket timeout of one try, shorter than that of two
    os.kill(process, signal.SIGCONT)
    for thread in threads:
        thread.join()
    assert calls_seen() - before == 4
    assert sorted(answers) == sorted([EmitOutcome.OK, SubmitOutcome.NEW])
    check_integrity(rooms)
    reader = TokenReader(own_server.url, "m")
    assert reader.read(scene.id).tokens == tokens(0, 2)
    reader.close()


# Emptied, or of another version


def test_an_emptied_server_gets_its_functions_again(rooms: Rooms) -> None:
    rooms.submit(submission("req_a"))
    epoch = rooms.renew("P", LOAD, [], LONG_MS).epoch
    rooms.redis.flushall()
    rooms.redis.execute_command("FUNCTION", "FLUSH")  # type: ignore[no-untyped-call]
    assert rooms.record("req_a") is None
    renewed = rooms.renew("P", LOAD, [], LONG_MS)
    assert not renewed.known
    assert renewed.epoch != epoch
    assert rooms.submit(submission("req_a")).outcome is SubmitOutcome.NEW


def test_another_version_is_replaced(rooms: Rooms, own_server: RedisServer) -> None:
    library_name, function = f"kvrelay_{PROTOCOL}", f"kvrelay_{PROTOCOL}_record"
    record = f"redis.register_function('{function}', function() return {{'old', 'x'}} end)"
    other = f"#!lua name={library_name}\n{record}"
    redis: Any = rooms.redis
    redis.function_load(other)
    assert rooms.record("req_a") is None
    (library,) = redis.function_list(library=library_name)
    assert f"kvrelay_{PROTOCOL}_submit" in str(library)
    redis.function_load(other, replace=True)  # by one that started later, of the same protocol
    assert rooms.submit(submission("req_a")).outcome is SubmitOutcome.NEW


def test_a_server_without_functions_is_named(server_binary: Path, tmp_path: Path) -> None:
    with RedisServer(server_binary, tmp_path / "old", options=["--rename-command", "FUNCTION", ""]) as old:
        rooms = Rooms(old.url, "m")
        with pytest.raises(UnsupportedServer, match="use Redis 7"):
            rooms.record("req_a")
        rooms.close()


def test_a_server_that_evicts_requests_is_named(server_binary: Path, tmp_path: Path) -> None:
    options = ["--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"]
    with RedisServer(server_binary, tmp_path / "cache", options=options) as cache:
        rooms = Rooms(cache.url, "m")
        with pytest.raises(UnsupportedServer, match="set it to noeviction"):
            rooms.submit(submission())
        cache.client().config_set("maxmemory-policy", "noeviction")
        assert rooms.submit(submission()).outcome is SubmitOutcome.NEW
        rooms.close()


# The last second is lost


def test_lost_tokens_are_sent_again(scene: Scene, own_server: RedisServer) -> None:
    scene.reach("decode")
    snapshot = own_server.snapshot()
    assert scene.emit(2, 3) is EmitOutcome.OK
    own_server.roll_back(snapshot)
    (answer,) = scene.rooms.emit([scene.emission(5, 1)])
    assert answer == Emitted(EmitOutcome.GAP, 2)
    assert scene.emit(2, 4) is EmitOutcome.OK
    reader = TokenReader(own_server.url, "m")
    assert reader.read(scene.id).tokens == tokens(0, 6)
    reader.close()
    check_integrity(scene.rooms)


def test_a_lost_end_is_sent_again(scene: Scene, own_server: RedisServer) -> None:
    scene.reach("decode")
    snapshot = own_server.snapshot()
    assert scene.emit(2, 1, Finish("stop")) is EmitOutcome.DONE
    own_server.roll_back(snapshot)
    assert state_of(scene) == "decode"
    assert scene.emit(2, 1, Finish("stop")) is EmitOutcome.DONE
    check_integrity(scene.rooms)


def test_a_lost_claim_is_lost_also_when_its_fence_is_issued_again(
    scene: Scene, own_server: RedisServer
) -> None:
    scene.reach("queued")
    snapshot = own_server.snapshot()
    scene.claim_unified()
    own_server.roll_back(snapshot)
    got = claim(scene.rooms, Leg.BOTH, "U2")
    assert got
    assert got.claimed.hold.fence == scene.d.fence
    assert scene.emit(0, 1) is EmitOutcome.STALE
    assert not scene.release(Leg.DECODE)
    renewed = scene.rooms.renew("U", LOAD, [scene.d], LONG_MS)
    assert [lost.hold for lost in renewed.lost] == [scene.d]
    assert renewed.rings == []
    check_integrity(scene.rooms)


def test_a_lost_publish_shows_in_the_renewal(scene: Scene, own_server: RedisServer) -> None:
    scene.reach("reserved")
    snapshot = own_server.snapshot()
    assert scene.rooms.publish(scene.d, scene.room, [7], 3).ok
    own_server.roll_back(snapshot)
    (kept,) = scene.rooms.renew("D", LOAD, [scene.d], LONG_MS).kept
    assert kept.room_state == "open"
    assert scene.rooms.publish(scene.d, scene.room, [7], 3).ok
    assert len(scene.new_mail("P")) == 1


def test_after_a_lost_kv_ready_the_prefill_leg_is_an_orphan(scene: Scene, own_server: RedisServer) -> None:
    """The prefill worker believes that it is done, so it does not list the leg."""
    scene.reach("published")
    snapshot = own_server.snapshot()
    assert scene.rooms.kv_ready(scene.p, scene.room, PREFILLED, TRANSFER).ok
    own_server.roll_back(snapshot)
    assert scene.emit(0, 1) is EmitOutcome.STALE
    assert [ring.leg for ring in scene.rooms.renew("P", LOAD, [], LONG_MS).rings] == [Leg.PREFILL]
    assert [mail.why for mail in scene.new_mail("D") if isinstance(mail, Ended)] == ["requeued"]
    assert scene.rooms.renew("D", LOAD, [scene.d], LONG_MS).lost[0].why == "requeued"
    check_integrity(scene.rooms)


def test_a_lost_submit_is_visible(scene: Scene, own_server: RedisServer) -> None:
    scene.rooms.workers()  # the functions are loaded
    snapshot = own_server.snapshot()
    scene.reach("unified")
    own_server.roll_back(snapshot)
    assert scene.rooms.record(scene.id) is None
    assert scene.rooms.renew("U", LOAD, [scene.d], LONG_MS).lost[0].why == "unknown"
    assert scene.emit(0, 1) is EmitOutcome.STALE


def test_a_restart_changes_the_epoch(rooms: Rooms, own_server: RedisServer) -> None:
    epochs = []
    for _ in range(2):
        epochs.append(rooms.renew("P", LOAD, [], LONG_MS).epoch)
        assert rooms.renew("P", LOAD, [], LONG_MS).epoch == epochs[-1]
        own_server.restart()
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("seed", [1, 2])
def test_no_call_is_half_done_after_a_kill(server_binary: Path, tmp_path: Path, seed: int) -> None:
    """The server is killed while calls run, its file ends early: each call is there whole or not at all."""
    rng = random.Random(seed)
    with RedisServer(server_binary, tmp_path / "data", append_fsync="everysec") as server:
        rooms = Rooms(server.url, "m")
        rooms.workers()
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                with contextlib.suppress(RedisConnectionError, RedisTimeoutError):
                    s = Scene(rooms, server, "m")
                    with contextlib.suppress(
                        AssertionError
                    ):  # another thread took the leg that this one wants
                        s.reach(rng.choice(["published", "decode", "finished", "unified", "cancelled"]))

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            time.sleep(rng.uniform(0.1, 0.4))
            server.kill()
            _cut_tail(server, rng)
            server.start()
        stop.set()
        for thread in threads:
            thread.join()
        assert rooms.list_requests(1_000)
        check_integrity(rooms)
        rooms.close()


def _cut_tail(server: RedisServer, rng: random.Random) -> None:
    """Lose what an operating system that fails may lose: the end of the file."""
    (newest,) = server.directory.glob("appendonlydir/*.incr.aof")
    content = newest.read_bytes()
    end = max(len(content) - rng.randrange(4_000), len(content) // 2)
    if server.binary == redis_binary():
        # Redis 7.0 repairs a file that ends inside a transaction only if it ends between two of its commands
        # (Valkey repairs both): else the next transaction would complete this one.
        end = content.rindex(b"*1\r\n$5\r\nMULTI\r\n", 0, end)
    newest.write_bytes(content[:end])


def test_a_crowd_of_threads_waits_for_connections(rooms: Rooms, own_server: RedisServer) -> None:
    rooms.workers()
    with own_server.client() as client:
        client.client_pause(500)  # so that all of them want a connection before the first has its answer
    with ThreadPoolExecutor(300) as pool:
        answers = list(pool.map(lambda _: rooms.record("req-none"), range(300)))
    assert answers == [None] * 300
    with own_server.client() as client:
        assert int(client.info("clients")["connected_clients"]) < 100


@pytest.mark.parametrize(("append_fsync", "kept"), [("always", True), ("everysec", True), ("no", False)])
def test_a_sync_waits_for_the_disk(tmp_path: Path, append_fsync: str, kept: bool) -> None:
    with RedisServer(valkey_binary(), tmp_path / "data", append_fsync=append_fsync) as server:
        rooms = Rooms(server.url, "m")
        for _ in range(2):
            rooms.submit(submission())
            assert rooms.sync(1_500) is kept
        rooms.close()


def test_many_share_a_wait_for_the_disk(tmp_path: Path) -> None:
    with RedisServer(valkey_binary(), tmp_path / "data", append_fsync="everysec") as server:
        rooms = Rooms(server.url, "m")
        with ThreadPoolExecutor(200) as pool:
            assert all(pool.map(lambda _: rooms.sync(1_900), range(200)))
        with server.client() as client:
            waits = client.info("commandstats")["cmdstat_waitaof"]["calls"]
        assert 1 <= waits <= 80, "not one for each"
        rooms.close()


def test_a_server_that_keeps_nothing_cannot_sync(tmp_path: Path) -> None:
    with RedisServer(valkey_binary(), tmp_path / "data") as server:
        rooms = Rooms(server.url, "m")
        rooms.submit(submission())
        with pytest.raises(UnsupportedServer, match="appendonly yes"):
            rooms.sync(1_500)
        rooms.close()


@pytest.mark.parametrize(
    ("setting", "value", "refusal"),
    [("maxmemory", "1", OutOfMemoryError), ("min-replicas-to-write", "1", ResponseError)],
)
def test_a_refusal_that_passes_is_not_taken_for_a_server_that_cannot(
    tmp_path: Path, setting: str, value: str, refusal: type[Exception]
) -> None:
    with RedisServer(valkey_binary(), tmp_path / "data", append_fsync="always") as server:
        rooms = Rooms(server.url, "m")
        with server.client() as client:
            client.config_set(setting, value)
            with pytest.raises(refusal):
                rooms.sync(1_500)
            client.config_set(setting, 0)
        assert rooms.sync(1_500)
        rooms.close()
