"""The token stream from any position, and mail: read at once, waited for, woken, and across a restart."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from relay.answers import Emission, EmitOutcome
from relay.mailbox import Ask, Mailbox, Settled
from relay.request import Finish, Hold, Leg, State, Token
from relay.rooms import Rooms
from relay.token_feed import TokenFeed
from relay.tokens import READ_TOKENS, Chunk, End, TokenReader
from tests.integration.scene import claim, submission, tokens
from tests.integration.until import until
from tests.servers import RedisServer

TEXTS = ["", "naïve ", "日本", "\n\r\0", '"quoted\\', "😀", "\ufffd"]
END = End(State.FINISHED, "held", "stop", "</s>", None, None)


@pytest.fixture
def reader(server: RedisServer, model: str) -> Iterator[TokenReader]:
    client = TokenReader(server.url, model)
    yield client
    client.close()


@pytest.fixture
def feed(server: RedisServer, model: str) -> Iterator[TokenFeed]:
    client = TokenFeed(server.url, model)
    yield client
    client.close()


def running(rooms: Rooms) -> Hold:
    rooms.submit(submission())
    got = claim(rooms, Leg.BOTH, "U")
    assert got
    return got.claimed.hold


def test_from_any_position(rooms: Rooms, reader: TokenReader) -> None:
    hold = running(rooms)
    sent = [Token(p, 100 + p, text, [[100 + p, -0.25], [7, -1.5]]) for p, text in enumerate(TEXTS)]
    assert reader.read(hold.request_id) == Chunk([], None)
    rooms.emit([Emission(hold, 0, sent)])
    for position in range(len(sent) + 1):
        assert reader.read(hold.request_id, position) == Chunk(sent[position:], None)
    rooms.emit([Emission(hold, len(sent), [], Finish("stop", "</s>", "held"))])
    for position in range(len(sent) + 1):
        assert reader.read(hold.request_id, position) == Chunk(sent[position:], END)
    assert reader.read(hold.request_id, 2, limit=2) == Chunk(sent[2:4], None)


def test_tokens_already_there_stay(rooms: Rooms, reader: TokenReader) -> None:
    hold = running(rooms)

    def emit(start: int, count: int, text: str) -> tuple[EmitOutcome, int, bool]:
        """Outcome, expected position, whether these were the first tokens of the request."""
        (answer,) = rooms.emit(
            [Emission(hold, start, [Token(p, p, text) for p in range(start, start + count)])]
        )
        return answer.outcome, answer.expected, answer.milestone is not None and answer.milestone.first

    assert emit(1, 2, "early") == (EmitOutcome.GAP, 0, False)
    assert emit(0, 2, "first") == (EmitOutcome.OK, 0, True)
    assert emit(0, 2, "again") == (EmitOutcome.OK, 0, False)
    assert emit(1, 3, "overlap") == (EmitOutcome.OK, 0, False)
    assert emit(0, 1, "late") == (EmitOutcome.OK, 0, False)
    assert emit(5, 1, "early") == (EmitOutcome.GAP, 4, False)
    texts = [token.text for token in reader.read(hold.request_id).tokens]
    assert texts == ["first", "first", "overlap", "overlap"]


def test_a_step_answers_for_each_request(rooms: Rooms, reader: TokenReader) -> None:
    a, b, c, d = (running(rooms) for _ in range(4))
    rooms.cancel(c.request_id)
    batch = [
        Emission(a, 0, tokens(0, 1)),
        Emission(b, 3, tokens(3, 1)),
        Emission(c, 0, tokens(0, 1)),
        Emission(d, 0, tokens(0, 1), Finish("length")),
    ]
    assert [e.outcome for e in rooms.emit(batch)] == ["ok", "gap", "stale", "done"]
    assert [e.outcome for e in rooms.emit(batch)] == ["ok", "gap", "stale", "done"]
    assert [len(reader.read(hold.request_id).tokens) for hold in (a, b, c, d)] == [1, 0, 0, 1]
    assert rooms.emit([]) == []


def test_waiting_for_many(rooms: Rooms, feed: TokenFeed) -> None:
    a, b = running(rooms), running(rooms)
    rooms.emit([Emission(a, 0, tokens(0, 2)), Emission(b, 0, tokens(0, 2))])
    assert feed.wait({a.request_id: 1, b.request_id: 2}) == {a.request_id: Chunk(tokens(1, 1), None)}
    emitter = threading.Thread(target=rooms.emit, args=([Emission(b, 2, tokens(2, 1), Finish("length"))],))
    emitter.start()
    positions = {a.request_id: 2, b.request_id: 2}
    got = until(lambda: feed.wait(positions), "the next token")
    emitter.join()
    assert list(got) == [b.request_id]
    assert got[b.request_id].tokens == tokens(2, 1)


def test_a_waiting_reader_can_be_woken(rooms: Rooms, feed: TokenFeed) -> None:
    hold = running(rooms)
    assert not feed.wake(), "nobody waits"
    seen: list[dict[str, Chunk]] = []
    thread = threading.Thread(target=lambda: seen.append(feed.wait({hold.request_id: 0}, block_ms=1_000)))
    thread.start()
    until(feed.wake, "the reader is woken")
    thread.join()
    assert seen == [{}]


def test_what_is_emitted_is_pushed(rooms: Rooms, feed: TokenFeed) -> None:
    hold = running(rooms)
    sent = [Token(p, 100 + p, text, [[100 + p, -0.25], [7, -1.5]]) for p, text in enumerate(TEXTS)]
    rooms.emit([Emission(hold, 0, sent[:2])])
    assert feed.wait({hold.request_id: 0}) == {hold.request_id: Chunk(sent[:2], None)}
    before = rooms.redis.info("commandstats")["cmdstat_xread"]["calls"]
    rooms.emit([Emission(hold, 1, sent[1:4])])
    assert feed.wait({hold.request_id: 2}) == {hold.request_id: Chunk(sent[2:4], None)}, "only what is new"
    rooms.emit([Emission(hold, 4, sent[4:], Finish("stop", "</s>", "held"))])
    chunk = feed.wait({hold.request_id: 4})[hold.request_id]
    if not chunk.end:  # which is a message of its own
        chunk = chunk._replace(end=feed.wait({hold.request_id: len(sent)})[hold.request_id].end)
    assert chunk == Chunk(sent[4:], END)
    assert rooms.redis.info("commandstats")["cmdstat_xread"]["calls"] == before, "nobody had to ask"


def test_any_position_can_be_waited_for_again(rooms: Rooms, feed: TokenFeed) -> None:
    hold = running(rooms)
    rooms.emit([Emission(hold, 0, tokens(0, READ_TOKENS + 5))])
    for _ in range(2):
        found = feed.wait({hold.request_id: 0})[hold.request_id].tokens
        found += feed.wait({hold.request_id: len(found)})[hold.request_id].tokens
        assert found == tokens(0, READ_TOKENS + 5)
    rooms.cancel(hold.request_id)
    end = feed.wait({hold.request_id: len(found)})[hold.request_id].end
    assert end
    assert end.state is State.CANCELLED


def test_a_push_that_is_lost_is_read(rooms: Rooms, feed: TokenFeed) -> None:
    hold = running(rooms)
    positions = {hold.request_id: 0}
    assert feed.wait(positions, block_ms=1) == {}
    (channel,) = rooms.redis.pubsub_channels(f"*{hold.request_id}*")
    feed._pushes.unsubscribe(channel)  # as if its messages went astray
    until(lambda: not rooms.redis.pubsub_channels(f"*{hold.request_id}*"), "it is not pushed")
    rooms.emit([Emission(hold, 0, tokens(0, 2))])
    assert until(lambda: feed.wait(positions), "a read") == {hold.request_id: Chunk(tokens(0, 2), None)}
    rooms.emit([Emission(hold, 2, tokens(2, 1))])
    assert feed.wait({hold.request_id: 2}) == {hold.request_id: Chunk(tokens(2, 1), None)}


def test_mail_comes_in_order_and_once(rooms: Rooms, server: RedisServer, model: str) -> None:
    box = Mailbox(server.url, model, "P")
    assert box.read(block_ms=0) == []
    for room in range(3):
        rooms.ask("P", room, "D")
    rooms.settle(9, "P")
    rooms.settle(9, "D")
    assert box.read() == [Ask(0, "D"), Ask(1, "D"), Ask(2, "D"), Settled(9)]
    assert box.read(block_ms=0) == []
    rooms.redis.xadd(f"{rooms.root}:mail:P", {"event": "of a newer version"})
    rooms.ask("P", 4, "D")
    assert box.read() == [Ask(4, "D")]
    box.close()


def test_a_mailbox_waits_for_mail(rooms: Rooms, server: RedisServer, model: str) -> None:
    box = Mailbox(server.url, model, "P")
    sender = threading.Thread(target=rooms.ask, args=("P", 1, "D"))
    sender.start()
    assert until(box.read, "mail") == [Ask(1, "D")]
    sender.join()
    box.close()


def test_readers_survive_a_restart(server_binary: Path, tmp_path: Path) -> None:
    with RedisServer(server_binary, tmp_path / "data", append_fsync="always") as server:
        rooms, box = Rooms(server.url, "m"), Mailbox(server.url, "m", "P")
        reader, feed = TokenReader(server.url, "m"), TokenFeed(server.url, "m")
        hold = running(rooms)
        rooms.emit([Emission(hold, 0, tokens(0, 1))])
        rooms.ask("P", 1, "D")
        assert box.read() == [Ask(1, "D")]
        assert feed.wait({hold.request_id: 0})
        server.kill()
        with pytest.raises(RedisConnectionError):
            box.read()
        with pytest.raises(RedisConnectionError):
            feed.wait({hold.request_id: 1})
        with pytest.raises(RedisConnectionError):
            reader.read(hold.request_id)
        server.start()
        rooms.ask("P", 2, "D")
        rooms.emit([Emission(hold, 1, tokens(1, 1))])
        assert box.read() == [Ask(2, "D")]
        assert feed.wait({hold.request_id: 1}) == {hold.request_id: Chunk(tokens(1, 1), None)}
        assert len(reader.read(hold.request_id).tokens) == 2
        for client in (rooms, box, reader, feed):
            client.close()
