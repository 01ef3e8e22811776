"""Results on their way into files: cut off at each step, and with two processors that believe in them."""

import json
import secrets
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.api.files import discard
from app.batch.batch_result import Result
from app.batch.batch_spool import Spool, sweep_parts
from app.batch.file_sweep import sweep_unfinished
from app.gateway.errors import ApiError
from app.gateway.storage import Storage
from relay.batches import Batch, Batches, BatchStatus, Kind, Order, Tokens
from relay.files import File, Files, new_file_id
from relay.rooms import Rooms
from relay.settings import Settings, SettingsError
from tests.servers import RedisServer, valkey_binary

LEASE_MS = 60_000
LINES = 12


class Cut(Exception):
    """The process dies here."""


class CutStorage(Storage):
    """Dies before or after its `step`-th write; the steps of all objects together."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.fuse: int | None = None

    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        self._burn()
        super().write(name, pieces)
        self._burn()

    def _burn(self) -> None:
        if self.fuse is None:
            return
        self.fuse -= 1
        if self.fuse == 0:
            raise Cut


@pytest.fixture
def service(rooms: Rooms, tmp_path: Path) -> Any:
    """What a spool works with."""
    return around(rooms, tmp_path)


def around(rooms: Rooms, folder: Path) -> Any:
    return SimpleNamespace(
        storage=CutStorage(replace(Settings(), files_url=str(folder))),
        files=Files(rooms.redis, rooms.root),
        batches=Batches(rooms.redis, rooms.root, rooms.protocol),
    )


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.batch.batch_spool.SPILL_BYTES", 100)


def start(service: Any, lines: int = LINES) -> Batch:
    batch_id = f"batch_{secrets.token_hex(16)}"
    order = Order(batch_id, "me", "/v1/completions", "file-1", "24h", 86_400)
    batch, new = service.batches.create(order)
    assert new
    return batch


def claim(service: Any, batch: Batch) -> str:
    nonce = secrets.token_hex(8)
    claimed = service.batches.claim(nonce, LEASE_MS)
    assert claimed
    assert claimed.batch_id == batch.batch_id
    return nonce


def result(number: int) -> Result:
    kind = Kind.ERRORS if number % 5 == 0 else Kind.OUTPUT
    return Result(kind, json.dumps({"line": number, "text": "x" * 30}).encode(), Tokens(2, 1, 3))


def numbers(service: Any, file_id: str | None) -> list[int]:
    if file_id is None:
        return []
    file = service.files.find(file_id)
    content = b"".join(service.storage.read(file.stored_as))
    assert len(content) == file.size_bytes
    return [json.loads(line)["line"] for line in content.splitlines()]


def check_ended(service: Any, batch: Batch, tmp_path: Path) -> None:
    ended = check_lines(service, batch)
    sweep_parts(service, 60_000)
    sweep_parts(service, 0)
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {ended.output_file_id, ended.error_file_id}, "no part is left"


def check_lines(service: Any, batch: Batch) -> Batch:
    ended: Batch = service.batches.find(batch.batch_id)
    assert ended.status is BatchStatus.COMPLETED
    assert (ended.completed, ended.failed) == (9, 3)
    assert ended.tokens == Tokens(2 * LINES, LINES, 3 * LINES)
    output, errors = numbers(service, ended.output_file_id), numbers(service, ended.error_file_id)
    assert sorted(output) == [n for n in range(LINES) if n % 5]
    assert sorted(errors) == [0, 5, 10]
    return ended


def test_many_results_leave_redis(service: Any, rooms: Rooms, tmp_path: Path) -> None:
    batch = start(service)
    spool = Spool(service, batch.batch_id, claim(service, batch))
    service.batches.start(batch.batch_id, spool._nonce, LINES)
    for number in range(LINES):
        assert spool.keep(number, result(number))
        assert spool.keep(number, result(number)), "a repeat changes nothing"
    assert len(service.batches.parts(batch.batch_id, Kind.OUTPUT)) > 1
    assert len(service.batches.pending(batch.batch_id, Kind.OUTPUT)) < 9
    assert spool.close(BatchStatus.COMPLETED)
    check_ended(service, batch, tmp_path)
    keys: Any = rooms.redis.keys(f"{rooms.root}:batch:*")
    assert [key.decode() for key in keys] == [f"{rooms.root}:batch:{batch.batch_id}"]


@pytest.mark.parametrize("fuse", range(1, 15))
def test_it_may_be_cut_off_anywhere(service: Any, tmp_path: Path, fuse: int) -> None:
    batch = start(service)
    service.storage.fuse = fuse
    cuts = 0
    ended = False
    while not ended:
        nonce = claim(service, batch)
        service.batches.start(batch.batch_id, nonce, LINES)
        spool = Spool(service, batch.batch_id, nonce)
        try:
            for number in range(LINES):
                spool.keep(number, result(number))
            ended = spool.close(BatchStatus.COMPLETED)
        except Cut:
            cuts += 1
            service.batches.release(batch.batch_id, nonce)
    assert cuts == 1, "the fuse is longer than the work"
    # Parts of the dead are in the batch's folder, which goes as a whole.
    check_ended(service, batch, tmp_path)


@pytest.mark.parametrize("place", ["lines", "finalized"])
def test_redis_may_forget_the_end(tmp_path: Path, place: str) -> None:
    """Its last second is lost, and in it that the batch had ended: it ends again, with the same lines."""
    with RedisServer(valkey_binary(), tmp_path / "redis", "always") as server:
        rooms = Rooms(server.url, "rolled-back")
        service = around(rooms, tmp_path / "files")
        batch = start(service)
        nonce = claim(service, batch)
        service.batches.start(batch.batch_id, nonce, LINES)
        spool = Spool(service, batch.batch_id, nonce)
        for number in range(LINES):
            spool.keep(number, result(number))
        if place == "finalized":
            file_ids = new_file_id(), new_file_id()
            service.batches.finalize(batch.batch_id, nonce, BatchStatus.COMPLETED, *file_ids)
        snapshot = server.snapshot()
        assert spool.close(BatchStatus.COMPLETED)
        sweep_parts(service)
        server.roll_back(snapshot)
        service.batches.release(batch.batch_id, nonce)
        assert Spool(service, batch.batch_id, claim(service, batch)).close(BatchStatus.COMPLETED)
        check_lines(service, batch)
        rooms.close()


def test_who_lost_the_batch_writes_nothing(service: Any, tmp_path: Path) -> None:
    batch = start(service)
    zombie = Spool(service, batch.batch_id, claim(service, batch))
    service.batches.start(batch.batch_id, zombie._nonce, LINES)
    zombie.keep(1, result(1))
    service.batches.release(batch.batch_id, zombie._nonce)
    owner = Spool(service, batch.batch_id, claim(service, batch))
    assert not zombie.keep(2, result(2))
    assert not zombie.close(BatchStatus.COMPLETED)
    assert service.batches.renew(batch.batch_id, zombie._nonce, LEASE_MS) is None
    for number in range(LINES):
        assert owner.keep(number, result(number))
    zombie._spill(Kind.OUTPUT)
    assert owner.close(BatchStatus.COMPLETED)
    assert not owner.keep(3, result(3)), "it has ended"
    assert not owner.close(BatchStatus.COMPLETED)
    check_ended(service, batch, tmp_path)


def test_only_one_claims_a_batch(service: Any) -> None:
    batches = [start(service) for _ in range(3)]
    claimed = [service.batches.claim(f"n{i}", LEASE_MS) for i in range(3)]
    assert [each.batch_id for each in claimed] == [batch.batch_id for batch in batches], "oldest first"
    assert service.batches.claim("n3", LEASE_MS) is None
    assert service.batches.claim("n1", LEASE_MS).batch_id == batches[1].batch_id, "a repeat is answered again"
    counts = Counter(each.batch_id for each in claimed)
    assert set(counts.values()) == {1}


def test_a_lease_that_ends_frees_the_batch(service: Any, rooms: Rooms) -> None:
    batch = start(service)
    service.batches.claim("dead", 1)
    redis: Any = rooms.redis
    redis.zadd(f"{rooms.root}:open_batches", {batch.batch_id: 1})
    assert service.batches.claim("next", LEASE_MS).batch_id == batch.batch_id


def test_a_storage_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    storage = Storage(replace(Settings(), files_url=str(tmp_path)))
    in_the_way = tmp_path / "files"
    in_the_way.write_bytes(b"")
    with pytest.raises(SettingsError, match="FILES_URL"):
        Storage(replace(Settings(), files_url=str(in_the_way / "below")))
    with pytest.raises(ApiError) as caught:
        storage.write("files/a", [b"x"])
    assert (caught.value.status, caught.value.code) == (503, "storage_away")


def test_what_a_gateway_left_of_an_upload_goes(service: Any, tmp_path: Path) -> None:
    def upload(finished: bool) -> str:
        file = File.new(new_file_id(), "", "input.jsonl", "batch", 3, None)
        service.files.begin(file.file_id)
        service.storage.write(file.stored_as, [b"abc"])
        if finished:
            service.files.add(file)
        return file.file_id

    whole, left = upload(finished=True), upload(finished=False)
    sweep_unfinished(service)
    assert {path.name for path in tmp_path.rglob("file-*")} == {whole, left}, "it may still be finished"
    sweep_unfinished(service, age_s=0)
    assert {path.name for path in tmp_path.rglob("file-*")} == {whole}
    assert service.files.unfinished(time.time()) == []


def test_a_file_whose_deletion_is_cut_off_leaves_nothing(service: Any, tmp_path: Path) -> None:
    file = File.new(new_file_id(), "", "input.jsonl", "batch", 3, None)
    service.files.begin(file.file_id)
    service.storage.write(file.stored_as, [b"abc"])
    service.files.add(file)
    delete, service.storage.delete = service.storage.delete, _away
    with pytest.raises(ApiError):
        discard(service, file)
    assert service.files.find(file.file_id) is None, "its client may not try again"
    service.storage.delete = delete
    sweep_unfinished(service, age_s=0)
    assert not list(tmp_path.rglob("file-*"))
    assert service.files.unfinished(time.time()) == []


def _away(*_: str) -> None:
    raise ApiError(503, "The storage cannot be used.", code="storage_away")
