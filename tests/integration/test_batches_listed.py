"""A page of batches or files costs what it shows, however many there are."""

import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from relay.batches import Batch, Batches, Order
from relay.files import File, Files, new_file_id
from relay.rooms import Rooms
from tests.servers import RedisServer

MANY = 40


@pytest.fixture
def rooms(valkey: RedisServer) -> Iterator[Rooms]:
    rooms = Rooms(valkey.url, f"listed-{secrets.token_hex(4)}")
    yield rooms
    rooms.close()


@pytest.fixture
def batches(rooms: Rooms) -> Batches:
    return Batches(rooms.redis, rooms.root, rooms.protocol)


def create(batches: Batches, owner: str = "me") -> str:
    order = Order(f"batch_{secrets.token_hex(16)}", owner, "/v1/completions", "file-1", "24h", 86_400)
    return batches.create(order)[0].batch_id


def ids(found: list[Batch] | None) -> list[str]:
    assert found is not None
    return [batch.batch_id for batch in found]


def reads(rooms: Rooms) -> int:
    """Whole batches that the server has read."""
    redis: Any = rooms.redis
    return int(redis.info("commandstats").get("cmdstat_hgetall", {"calls": 0})["calls"])


def test_pages_are_newest_first_and_complete(batches: Batches) -> None:
    made = [create(batches) for _ in range(MANY)]
    other = create(batches, "another")
    shown: list[str] = []
    while page := ids(batches.of("me", shown[-1] if shown else None, 7)):
        shown += page
    assert shown == made[::-1]
    assert batches.of("me", other, 7) is None, "nobody finds out about others by paging"
    assert batches.of("me", "batch_x", 7) is None


def test_a_page_reads_what_it_shows(rooms: Rooms, batches: Batches) -> None:
    made = [create(batches) for _ in range(MANY)]
    before = reads(rooms)
    assert len(ids(batches.of("me", made[20], 5))) == 5
    assert reads(rooms) - before == 5


def test_expired_ones_are_passed_over_and_read_once(rooms: Rooms, batches: Batches) -> None:
    made = [create(batches) for _ in range(MANY)]
    redis: Any = rooms.redis
    for batch_id in made[10:-1]:
        redis.delete(f"{rooms.root}:batch:{batch_id}")
    assert ids(batches.of("me", None, 3)) == [made[-1], made[9], made[8]]
    before = reads(rooms)
    assert ids(batches.of("me", made[-1], 2)) == [made[9], made[8]]
    assert reads(rooms) - before == 2
    assert ids(batches.of("me", None, MANY)) == [made[-1], *made[9::-1]]


def test_files_have_pages_both_ways(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relay.files._READ_AT_ONCE", 3)
    files = Files(rooms.redis, rooms.root)
    purposes = ["batch", "batch_output", "batch"] * 4
    made = [File.new(new_file_id(), "me", str(i), each, 1, None) for i, each in enumerate(purposes)]
    for file in made:
        files.add(file)

    def pages(**how: Any) -> list[str]:
        shown: list[str] = []
        while page := files.of("me", shown[-1] if shown else None, 2, **how):
            shown += [file.file_id for file in page]
        return shown

    oldest_first = pages(newest_first=False)
    assert sorted(oldest_first) == sorted(file.file_id for file in made)
    assert pages() == oldest_first[::-1]
    of_a_purpose = {file.file_id for file in made if file.purpose == "batch"}
    assert pages(purpose="batch") == [each for each in oldest_first[::-1] if each in of_a_purpose]
    assert files.of("another", oldest_first[0], 2) is None
