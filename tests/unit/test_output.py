"""The output thread against a server that answers as told: gone, forgetful, taken over, or refusing."""

import queue
import threading
import time
from collections import Counter
from typing import cast

import pytest
from redis.exceptions import ConnectionError, ResponseError, TimeoutError

from relay.answers import EmitOutcome, Emitted
from relay.model_file import default_model_path
from relay.request import Claimed, Hold, Leg
from relay.rooms import Rooms
from relay.sampling import SamplingParams
from relay.server_clock import ServerClock
from relay.tokenizer import Tokenizer
from tests.meters import meters
from workers.engine.messages import Crashed, Ending, Produced, Sampled
from workers.output import Close, Closed, Finished, Lost, Open, OutputThread

DEADLINE_S = 10.0
CLOCK = ServerClock(0.0, 0.0)


class FakeRooms:
    """Streams in memory by the rules of `emit`. Tests script what fails."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.streams: dict[str, list[int]] = {}
        self.texts: dict[str, str] = {}
        self.finished: dict[str, str] = {}
        self.stale: set[str] = set()
        self.poison: set[str] = set()
        self.calls: list[int] = []  # emissions per call
        self.writes: Counter[tuple[str, int]] = Counter()
        self.away: type[Exception] | None = None
        self.lose_replies = 0

    def emit(self, batch):
        with self.lock:
            self.calls.append(len(batch))
            if self.away:
                raise self.away("gone")
            if any(emission.hold.nonce in self.poison for emission in batch):
                raise ResponseError("script failed")
            answers = [self._emit_one(emission) for emission in batch]
            if self.lose_replies:
                self.lose_replies -= 1
                raise TimeoutError("the reply is late")
            return answers

    def _emit_one(self, emission) -> Emitted:
        key = emission.hold.nonce
        if key in self.stale:
            return Emitted(EmitOutcome.STALE)
        if key in self.finished:
            return Emitted(EmitOutcome.DONE)
        stream = self.streams.setdefault(key, [])
        if emission.start_position > len(stream):
            return Emitted(EmitOutcome.GAP, len(stream))
        for token in emission.tokens[len(stream) - emission.start_position :]:
            assert token.position == len(stream)
            stream.append(token.token_id)
            self.texts[key] = self.texts.get(key, "") + token.text
            self.writes[key, token.position] += 1
        if not emission.finish:
            return Emitted(EmitOutcome.OK)
        self.finished[key] = emission.finish.reason
        self.texts[key] = self.texts.get(key, "") + emission.finish.text
        return Emitted(EmitOutcome.DONE)


class Bench:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.rooms = FakeRooms()
        self.outcomes: queue.SimpleQueue = queue.SimpleQueue()
        self.meters = meters()
        self.output = OutputThread(cast(Rooms, self.rooms), tokenizer, self.outcomes.put, self.meters)
        self.put = self.output.put

    def open(self, key, emitted=(), **given) -> None:
        params = SamplingParams(**({"max_tokens": 1000} | given))
        hold = Hold(f"req-{key}", Leg.DECODE, 1, key)
        self.put(Open(key, Claimed(hold, 1, 1, False, (1, 2), tuple(emitted), params, "P", 0, 0.0, CLOCK)))

    def step(self, position, *keys, ending=None) -> None:
        self.put([Produced(key, position, Sampled(1000 + position), ending) for key in keys])

    def outcome(self):
        return self.outcomes.get(timeout=DEADLINE_S)

    def until(self, condition) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            with self.rooms.lock:
                if condition():
                    return
            assert time.monotonic() < deadline, "nothing happened"
            time.sleep(0.002)

    def stream(self, key) -> list[int]:
        return list(self.rooms.streams.get(key, []))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(default_model_path())


@pytest.fixture
def bench(tokenizer):
    bench = Bench(tokenizer)
    bench.output.start()
    yield bench
    bench.rooms.away = None
    bench.output.stop()
    assert not bench.output._thread.is_alive()


def ids(count, start=0) -> list[int]:
    return [1000 + position for position in range(start, count)]


def test_one_call_per_step_for_all_legs(tokenizer):
    bench = Bench(tokenizer)
    for key in "abc":
        bench.open(key)
    bench.step(0, *"abc")
    bench.output.start()
    bench.until(lambda: all(bench.stream(key) == ids(1) for key in "abc"))
    bench.output.stop()
    assert bench.rooms.calls == [3]


def test_what_waits_goes_in_one_call(tokenizer):
    bench = Bench(tokenizer)
    bench.open("a")
    for position in range(20):
        bench.step(position, "a")
    bench.output.start()
    bench.until(lambda: bench.stream("a") == ids(20))
    bench.output.stop()
    assert bench.rooms.calls == [1]


def test_finish(bench):
    bench.open("a")
    bench.step(0, "a")
    bench.step(1, "a", ending=Ending.LENGTH)
    assert bench.outcome() == Finished("a", "length")
    assert bench.stream("a") == ids(2)


def test_a_stop_string_finishes_and_later_tokens_are_ignored(bench, tokenizer):
    bench.open("a", stop=(" stop",))
    for position, token in enumerate(tokenizer.encode("We now stop it")):
        bench.put([Produced("a", position, Sampled(token))])
    assert bench.outcome() == Finished("a", "stop")
    assert bench.rooms.texts["a"] == "We now"


def test_nothing_is_lost_or_written_twice_while_the_server_is_away(bench):
    bench.open("a")
    bench.open("b")
    bench.step(0, "a", "b")
    bench.until(lambda: bench.stream("a") == ids(1))
    for away in (ConnectionError, TimeoutError):
        bench.rooms.away = away
        tried = len(bench.rooms.calls)
        start = len(bench.stream("a"))
        for position in range(start, start + 50):
            bench.step(position, "a", "b")
        bench.until(lambda tried=tried: len(bench.rooms.calls) >= tried + 2)
        assert len(bench.stream("a")) == start
        bench.rooms.away = None
        bench.until(lambda start=start: bench.stream("a") == bench.stream("b") == ids(start + 50))
    assert set(bench.rooms.writes.values()) == {1}


def test_a_late_reply(bench):
    bench.rooms.lose_replies = 2
    bench.open("a")
    bench.step(0, "a")
    bench.step(1, "a", ending=Ending.STOP)
    assert bench.outcome() == Finished("a", "stop")
    assert bench.stream("a") == ids(2)
    assert set(bench.rooms.writes.values()) == {1}


def test_a_server_that_forgot_gets_it_again(bench):
    bench.open("a")
    for position in range(10):
        bench.step(position, "a")
    bench.until(lambda: bench.stream("a") == ids(10))
    with bench.rooms.lock:
        del bench.rooms.streams["a"][3:]
    bench.step(10, "a")
    bench.until(lambda: bench.stream("a") == ids(11))
    assert [bench.rooms.writes["a", position] for position in range(11)] == [1] * 3 + [2] * 7 + [1]


def test_a_stale_leg_is_lost_and_the_others_go_on(bench):
    bench.open("a")
    bench.open("b")
    bench.rooms.stale.add("a")
    bench.step(0, "a", "b")
    assert bench.outcome() == Lost("a")
    bench.step(1, "a", "b")
    bench.until(lambda: bench.stream("b") == ids(2))
    assert bench.outcomes.empty()


def test_positions_that_do_not_add_up_lose_the_leg_alone(bench):
    bench.open("a")
    bench.open("b")
    bench.put([Produced("a", 5, Sampled(7)), Produced("b", 0, Sampled(1000))])
    assert bench.outcome() == Lost("a", "ValueError: the engine produced position 5, expected 0")
    bench.until(lambda: bench.stream("b") == ids(1))


def test_a_leg_that_the_server_cannot_take_does_not_hold_up_the_others(bench):
    bench.open("a")
    bench.open("b")
    bench.rooms.poison.add("a")
    bench.step(0, "a", "b")
    assert bench.outcome() == Lost("a", "ResponseError: script failed")
    bench.until(lambda: bench.stream("b") == ids(1))


def test_a_server_that_goes_while_legs_are_taken_apart_is_not_asked_for_each(tokenizer):
    bench = Bench(tokenizer)
    rooms, emit = bench.rooms, bench.rooms.emit

    def refuse_and_go(batch):
        rooms.calls.append(len(batch))
        rooms.emit, rooms.away = emit, ConnectionError
        raise ResponseError("script failed")

    rooms.emit = refuse_and_go
    for key in "abc":
        bench.open(key)
    bench.step(0, *"abc")
    bench.output.start()
    bench.until(lambda: len(rooms.calls) >= 3)
    rooms.away = None
    bench.until(lambda: all(rooms.streams.get(key) == ids(1) for key in "abc"))
    bench.output.stop()
    assert rooms.calls[:3] == [3, 1, 3], "each call to a server that is away takes seconds"


def test_a_crash_of_the_thread_is_told(bench):
    bench.rooms.emit = lambda batch: []  # answers that do not go with the question
    bench.open("a")
    bench.step(0, "a")
    assert isinstance(bench.outcome(), Crashed)


def test_close_emits_what_came_before_it(bench):
    bench.open("a")
    bench.rooms.away = ConnectionError
    for position in range(5):
        bench.step(position, "a")
    bench.put(Close("a"))
    bench.step(5, "a")
    bench.until(lambda: len(bench.rooms.calls) >= 2)
    assert bench.outcomes.empty()
    bench.rooms.away = None
    assert bench.outcome() == Closed("a")
    assert bench.stream("a") == ids(5)


def test_close_of_an_idle_an_unknown_and_an_ended_leg(bench):
    bench.open("a")
    bench.put(Close("a"))
    assert bench.outcome() == Closed("a")
    bench.put(Close("a"))
    bench.put(Close("never"))
    bench.open("b")
    bench.put(Close("b"))
    assert bench.outcome() == Closed("b")


def test_tokens_of_closed_and_unknown_keys_are_ignored(bench):
    bench.step(0, "never")
    bench.open("a")
    bench.put(Close("a"))
    bench.step(0, "a")
    assert bench.outcome() == Closed("a")
    bench.open("b")
    bench.step(0, "a", "never", "b")
    bench.until(lambda: bench.stream("b") == ids(1))
    assert set(bench.rooms.streams) == {"b"}


def test_goes_on_where_the_earlier_attempt_ended(bench):
    bench.rooms.streams["a"] = ids(4)
    bench.open("a", emitted=ids(4))
    bench.step(4, "a", ending=Ending.LENGTH)
    assert bench.outcome() == Finished("a", "length")
    assert bench.stream("a") == ids(5)


def test_stop_emits_what_came_before_it(tokenizer):
    bench = Bench(tokenizer)
    bench.rooms.lose_replies = 1
    bench.open("a")
    for position in range(600):
        bench.step(position, "a")
    bench.output.start()
    bench.output.stop()
    assert bench.stream("a") == ids(600)


def test_stop_ends_though_the_server_is_away(tokenizer):
    bench = Bench(tokenizer)
    bench.rooms.away = ConnectionError
    bench.open("a")
    bench.step(0, "a")
    bench.output.start()
    bench.until(lambda: bench.rooms.calls)
    bench.output.stop(timeout_s=0.2)
    bench.output._thread.join(DEADLINE_S)
    assert not bench.output._thread.is_alive()
