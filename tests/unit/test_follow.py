"""A watch hands on each position once, and never another token at a position it has handed on."""

import time
from typing import Any, cast

import pytest

from app.gateway.follow import Follower, RedisBack, StreamDiverged, Watch
from relay.request import State, Token
from relay.tokens import Chunk, End
from tests.gateway_rig import eventually

END = End(State.FINISHED, "", "stop", None, None, None)


def watch(start: int = 0) -> Watch:
    return Watch(cast(Any, None), "req-1", start)


def chunk(first: int, ids: list[int], end: End | None = None) -> Chunk:
    return Chunk([Token(first + i, token_id, "") for i, token_id in enumerate(ids)], end)


def taken(w: Watch) -> list[Any]:
    """All that is there: token ids, and the rest as it is."""
    found: list[Any] = []
    while (item := w.take(0)) is not None:
        found += [token.token_id for token in item] if isinstance(item, list) else [item]
    return found


def test_tokens_and_end_in_order() -> None:
    w = watch()
    w.feed(chunk(0, [5, 6]), 0)
    assert w.next_position == 2
    w.feed(chunk(2, [7], END), 2)
    assert taken(w) == [5, 6, 7, END]
    assert w.ended


def test_it_begins_where_it_was_asked_to() -> None:
    w = watch(start=2)
    w.feed(chunk(0, [5, 6, 7]), 0)
    assert taken(w) == [7]


def test_what_a_slower_watch_needed_is_not_handed_on_twice() -> None:
    w = watch()
    w.feed(chunk(0, [5, 6]), 0)
    w.feed(chunk(1, [6, 7]), 1)
    assert taken(w) == [5, 6, 7]


def test_what_was_read_before_it_came_is_left_for_the_next_read() -> None:
    w = watch()
    w.feed(chunk(4, [9], END), 4)
    assert taken(w) == []
    assert w.next_position == 0
    assert not w.ended


def test_after_redis_was_away_the_same_tokens_are_passed_over() -> None:
    w = watch()
    w.feed(chunk(0, [5, 6, 7]), 0)
    w.read_again()
    assert w.next_position == 0
    w.feed(chunk(0, [5, 6]), 0)
    w.feed(chunk(2, [7, 8], END), 2)
    assert taken(w) == [5, 6, 7, RedisBack(), 8, END]


@pytest.mark.parametrize(
    "after",
    [
        chunk(0, [5, 9]),
        chunk(0, [5, 6, 9], END),
        chunk(0, [5], END),
        chunk(0, [], END),
    ],
)
def test_another_stream_at_positions_handed_on_is_an_error(after: Chunk) -> None:
    w = watch()
    w.feed(chunk(0, [5, 6, 7]), 0)
    assert taken(w) == [5, 6, 7]
    w.read_again()
    w.feed(after, 0)
    assert w.ended
    assert isinstance(w.take(0), RedisBack)
    with pytest.raises(StreamDiverged):
        w.take(0)


class OneRead:
    """A reader whose first read finds the end; a second one is a bug."""

    def __init__(self) -> None:
        self.reads = 0

    def wait(self, positions: dict[str, int], block_ms: int) -> dict[str, Chunk]:
        self.reads += 1
        if self.reads > 1:
            raise RuntimeError("a bug")
        return {request_id: chunk(0, [5], END) for request_id in positions}

    def wake(self) -> bool:
        return False

    def close(self) -> None: ...


class Silent(OneRead):
    """A reader that never finds anything."""

    def wait(self, positions: dict[str, int], block_ms: int) -> dict[str, Chunk]:
        time.sleep(0.001)
        return {}


def test_an_ended_stream_is_read_no_more_while_its_client_is_slow() -> None:
    follower = Follower(cast(Any, OneRead()))
    w = follower.follow("req-1", 0)
    assert w.take(10) is not None
    assert w.take(10) == END
    eventually(lambda: follower.waiting() == 0, "leaving")
    assert follower.alive()
    follower.close()


def test_one_waiter_gets_several_streams_by_their_number() -> None:
    follower = Follower(cast(Any, OneRead()))
    watches = follower.follow_all(["req-1", "req-1-1", "req-1-2"])
    found: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    for _ in range(6):
        item = watches.inbox.take(10)
        assert item is not None
        found[item[0]].append(item[1])
    assert found == {number: [[Token(0, 5, "")], END] for number in range(3)}
    assert watches.inbox.take(0) is None
    eventually(lambda: follower.waiting() == 0, "leaving")
    follower.close()


def test_streams_of_one_waiter_count_once() -> None:
    follower = Follower(cast(Any, Silent()))
    group = follower.follow_all(["req-1", "req-1-1"])
    alone = follower.follow("req-1", 0)
    assert follower.waiting() == 2
    group.close()
    assert follower.waiting() == 1
    alone.close()
    assert follower.waiting() == 0
    follower.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_reader_is_told() -> None:
    follower = Follower(cast(Any, OneRead()))
    for request_id in ("req-1", "req-2"):
        assert follower.alive()
        follower.follow(request_id, 0)
        eventually(lambda: follower.waiting() == 0 or not follower.alive(), "reading")
    assert not follower.alive()
    follower.close()


def test_a_hole_in_the_stream_is_an_error() -> None:
    w = watch()
    w.feed(chunk(1, [5]), 0)
    with pytest.raises(StreamDiverged):
        w.take(0)
