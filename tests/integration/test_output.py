"""The output thread and a real server: clients read what was produced, once, whatever happens to it."""

import queue
import time
from pathlib import Path

import pytest

from relay.model_file import default_model_path
from relay.request import Claimed, Leg, State, Submission, Why
from relay.rooms import Rooms
from relay.sampling import SamplingParams
from relay.tokenizer import Tokenizer
from relay.tokens import TokenReader
from tests.integration.scene import LONG_MS, claim
from tests.meters import meters
from tests.servers import RedisServer
from workers.engine.messages import Ending, Produced, Sampled
from workers.output import Close, Closed, Finished, Lost, Open, OutputThread

DEADLINE_S = 20.0
TEXT = "The quick brown fox – schneller als 🦊 – jumps over the lazy dog, again and again."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(default_model_path())


class Bench:
    """An output thread with one server, and legs that a unified worker claimed."""

    def __init__(self, tokenizer: Tokenizer, rooms: Rooms, url: str, model: str) -> None:
        self.tokenizer = tokenizer
        self.rooms = rooms
        self.reader = TokenReader(url, model)
        self.outcomes: queue.SimpleQueue = queue.SimpleQueue()
        self.meters = meters()
        self.output = OutputThread(rooms, tokenizer, self.outcomes.put, self.meters)
        self.output.start()

    def close(self) -> None:
        self.output.stop()
        self.reader.close()

    def open(self, request_id: str, **given) -> Claimed:
        params = SamplingParams(**({"max_tokens": 900} | given))
        self.rooms.submit(Submission(request_id, (1, 2, 3), params, LONG_MS))
        return self.claim()

    def claim(self) -> Claimed:
        got = claim(self.rooms, Leg.BOTH, "U")
        assert got
        self.output.put(Open(got.claimed.hold.nonce, got.claimed))
        return got.claimed

    def produce(self, claimed: Claimed, ids, start: int, stop: int, ending: Ending | None = None) -> None:
        """One engine step per token."""
        for position in range(start, stop):
            last = ending if position == stop - 1 else None
            self.output.put([Produced(claimed.hold.nonce, position, Sampled(ids[position]), last)])

    def outcome(self):
        return self.outcomes.get(timeout=DEADLINE_S)

    def until(self, request_id: str, count: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while len(self.reader.read(request_id).tokens) < count:
            assert time.monotonic() < deadline, "the tokens did not arrive"
            time.sleep(0.005)

    def check(self, request_id: str, ids, text: str) -> None:
        tokens, end = self.reader.read(request_id)
        assert [token.position for token in tokens] == list(range(len(ids)))
        assert [token.token_id for token in tokens] == list(ids)
        assert "".join(token.text for token in tokens) + (end.text if end else "") == text


@pytest.fixture
def bench(tokenizer, rooms, server, model):
    bench = Bench(tokenizer, rooms, server.url, model)
    yield bench
    bench.close()


@pytest.fixture
def own(tokenizer, server_binary: Path, tmp_path: Path, model):
    """A bench with a server that may be killed, and that server. What it acknowledged is on its disk."""
    with RedisServer(server_binary, tmp_path / "server", append_fsync="always") as server:
        rooms = Rooms(server.url, model)
        bench = Bench(tokenizer, rooms, server.url, model)
        yield bench, server
        bench.close()
        rooms.close()


def test_the_client_reads_what_was_produced(bench):
    ids = bench.tokenizer.encode(TEXT)
    claimed = bench.open("req_a")
    bench.produce(claimed, ids, 0, len(ids), Ending.LENGTH)
    assert bench.outcome() == Finished(claimed.hold.nonce, "length")
    bench.check("req_a", ids, TEXT)
    record = bench.rooms.record("req_a")
    assert (record.state, record.finish_reason, record.stop_reason) == (State.FINISHED, "length", None)
    assert record.completion_tokens == len(ids)


def test_the_record_names_the_stop_string(bench):
    ids = bench.tokenizer.encode(TEXT)
    claimed = bench.open("req_a", stop=("lazy dog", "x – s"))
    bench.produce(claimed, ids, 0, len(ids), Ending.LENGTH)
    assert bench.outcome() == Finished(claimed.hold.nonce, "stop")
    record = bench.rooms.record("req_a")
    assert (record.finish_reason, record.stop_reason) == ("stop", "x – s")
    bench.check("req_a", ids[: record.completion_tokens], "The quick brown fo")


def test_logprobs_reach_the_client(bench):
    claimed = bench.open("req_a", logprobs=1)
    logprobs = [[7, -0.25], [7, -0.25]]
    bench.output.put([Produced(claimed.hold.nonce, 0, Sampled(7, logprobs))])
    bench.until("req_a", 1)
    assert bench.reader.read("req_a").tokens[0].logprobs == logprobs


def test_a_cancelled_leg_is_lost(bench):
    claimed = bench.open("req_a")
    other = bench.open("req_b")
    bench.rooms.cancel("req_a")
    ids = bench.tokenizer.encode(TEXT)
    bench.output.put([Produced(leg.hold.nonce, 0, Sampled(ids[0])) for leg in (claimed, other)])
    assert bench.outcome() == Lost(claimed.hold.nonce)
    bench.until("req_b", 1)


def test_handed_over_in_the_middle_the_text_is_the_same(bench):
    """Each owner closes its leg and gives it back; the next one rebuilds the state from the stream."""
    ids = bench.tokenizer.encode(TEXT)
    claimed = bench.open("req_a", stop=("never there", "again."), include_stop_str_in_output=True)
    for start, stop in ((0, 5), (5, 11), (11, 17)):
        bench.produce(claimed, ids, start, stop)
        bench.output.put(Close(claimed.hold.nonce))
        assert bench.outcome() == Closed(claimed.hold.nonce)
        assert bench.rooms.release(claimed.hold, Why.DRAIN).ok
        claimed = bench.claim()
        assert claimed.emitted == tuple(ids[:stop])
    bench.produce(claimed, ids, 17, len(ids))
    assert bench.outcome() == Finished(claimed.hold.nonce, "stop")
    bench.check("req_a", ids, TEXT)


def test_a_server_that_dies_and_comes_back(own):
    bench, server = own
    ids = bench.tokenizer.encode(TEXT)
    claimed = bench.open("req_a")
    bench.produce(claimed, ids, 0, 5)
    bench.until("req_a", 5)
    server.kill()
    bench.produce(claimed, ids, 5, len(ids), Ending.LENGTH)
    server.start()
    assert bench.outcome() == Finished(claimed.hold.nonce, "length")
    bench.check("req_a", ids, TEXT)


def test_a_server_that_lost_its_last_second(own):
    bench, server = own
    ids = bench.tokenizer.encode(TEXT)
    claimed = bench.open("req_a")
    bench.produce(claimed, ids, 0, 3)
    bench.until("req_a", 3)
    snapshot = server.snapshot()
    bench.produce(claimed, ids, 3, 12)
    bench.until("req_a", 12)
    server.roll_back(snapshot)
    assert len(bench.reader.read("req_a").tokens) == 3
    bench.produce(claimed, ids, 12, len(ids), Ending.LENGTH)
    assert bench.outcome() == Finished(claimed.hold.nonce, "length")
    bench.check("req_a", ids, TEXT)
