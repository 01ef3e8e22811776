"""What a gateway does: submit once, list, cancel, and be told when there is no room."""

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from relay.answers import Emission, EmitOutcome, SubmitOutcome, Submitted
from relay.prompt_logprobs import PromptLogprobs
from relay.request import Finish, Leg, Ring, State
from relay.rooms import Rooms
from relay.sampling import SamplingParams
from relay.tokens import TokenReader
from tests.integration.scene import LONG_MS, Scene, check_integrity, claim, submission, tokens
from tests.integration.until import until
from tests.servers import RedisServer


def test_a_submit_that_runs_twice_is_one_request(rooms: Rooms) -> None:
    s = submission("req_a")
    first, again = rooms.submit(s), rooms.submit(s)
    assert first == again == (SubmitOutcome.NEW, "req_a", [Ring(Leg.PREFILL, "req_a", 3)], 0)
    assert [r.request_id for r in rooms.list_requests(9)] == ["req_a"]
    check_integrity(rooms)


def test_an_idempotency_key_names_one_request(rooms: Rooms) -> None:
    first = submission("req_a", idempotency_key="client:k", body_hash="h1")
    assert rooms.earlier("client:k") is None
    assert rooms.submit(first).outcome is SubmitOutcome.NEW
    assert rooms.submit(first).outcome is SubmitOutcome.NEW, "the same call again, not the same client again"
    twin = submission("req_b", idempotency_key="client:k", body_hash="h1")
    assert rooms.submit(twin)[:3] == (SubmitOutcome.DUPLICATE, "req_a", [Ring(Leg.PREFILL, "req_a", 3)])
    assert rooms.earlier("client:k") == ("req_a", "h1")
    other = submission("req_c", idempotency_key="client:k", body_hash="h2")
    assert rooms.submit(other)[:3] == (SubmitOutcome.CONFLICT, "req_a", [])
    assert [r.request_id for r in rooms.list_requests(9)] == ["req_a"]

    assert claim(rooms, Leg.PREFILL, "P")
    assert rooms.submit(twin)[:3] == (SubmitOutcome.DUPLICATE, "req_a", []), "nobody has to be rung any more"
    redis: Any = rooms.redis
    assert 86_390_000 < redis.pttl(f"{rooms.root}:idem:client:k") <= 86_400_000


def test_one_of_many_threads_with_a_key_wins(rooms: Rooms) -> None:
    barrier = threading.Barrier(8)
    outcomes: list[tuple[SubmitOutcome, str]] = []

    def submit(i: int) -> None:
        s = submission(f"req_{i}_of_8", idempotency_key="k", body_hash="h")
        barrier.wait()
        outcomes.append(rooms.submit(s)[:2])

    threads = [threading.Thread(target=submit, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(o for o, _ in outcomes) == [SubmitOutcome.DUPLICATE] * 7 + [SubmitOutcome.NEW]
    assert len({request_id for _, request_id in outcomes}) == 1


def test_too_many_open_requests(rooms: Rooms) -> None:
    for i in range(3):
        outcome = rooms.submit(submission(f"req_full{i}", max_open_requests=2)).outcome
        assert outcome is (SubmitOutcome.NEW if i < 2 else SubmitOutcome.FULL)
    rooms.cancel("req_full0")
    assert rooms.submit(submission(max_open_requests=2)).outcome is SubmitOutcome.NEW


def test_too_many_open_bytes(rooms: Rooms) -> None:
    limit = 5_000
    assert (
        rooms.submit(submission("req_large", tokens=1_000, max_open_bytes=limit)).outcome is SubmitOutcome.NEW
    )
    assert rooms.submit(submission(tokens=1_000, max_open_bytes=limit)).outcome is SubmitOutcome.FULL
    rooms.cancel("req_large")
    assert rooms.submit(submission(tokens=1_000, max_open_bytes=limit)).outcome is SubmitOutcome.NEW
    check_integrity(rooms)


def test_the_likelihood_of_a_prompt_takes_room_too(rooms: Rooms) -> None:
    def submit(wanted: int | None) -> SubmitOutcome:
        params = SamplingParams(max_tokens=1, prompt_logprobs=wanted)
        return rooms.submit(replace(submission(tokens=100), params=params, max_open_bytes=5_000)).outcome

    assert submit(20) is SubmitOutcome.FULL
    assert submit(0) is SubmitOutcome.NEW
    scores = PromptLogprobs(
        np.zeros((99, 1), np.int32), np.zeros((99, 1), np.float32), np.zeros(99, np.int32)
    )
    assert len(scores.pack()) == PromptLogprobs.packed_bytes(100, 0)
    check_integrity(rooms)


def test_what_would_wait_beyond_its_deadline_is_refused(rooms: Rooms) -> None:
    def submit(timeout_ms: int, **more: Any) -> Submitted:
        return rooms.submit(submission(timeout_ms=timeout_ms, **more))

    for _ in range(20):
        submit(LONG_MS)
    assert submit(1).outcome is SubmitOutcome.NEW, "nobody knows yet how fast the queue moves"
    redis: Any = rooms.redis
    pace = f"{rooms.root}:pace"
    for _ in range(5):
        assert claim(rooms, Leg.PREFILL, "P")
        redis.hset(
            pace, "since", float(redis.hget(pace, "since")) - 40
        )  # as if it had been that much earlier
    late = submit(100)
    assert late.outcome is SubmitOutcome.LATE
    assert late.early_ms > 16 * 40 - 100, "so long do the others take"
    assert submit(100, priority=-1).outcome is SubmitOutcome.NEW, "nothing goes before it"
    assert submit(LONG_MS).outcome is SubmitOutcome.NEW
    redis.hset(pace, "since", 1)  # all workers were away
    assert claim(rooms, Leg.PREFILL, "P")
    assert submit(LONG_MS).outcome is SubmitOutcome.NEW, "they are back"
    while claim(rooms, Leg.PREFILL, "P"):
        continue
    assert submit(1).outcome is SubmitOutcome.NEW, "nothing waits any more"


def test_a_queue_that_empties_without_a_claim_has_no_pace(rooms: Rooms) -> None:
    """What passes until the next claim is no time in which somebody waited."""
    redis: Any = rooms.redis
    pace = f"{rooms.root}:pace"
    for _ in range(2):
        rooms.submit(submission())
    assert claim(rooms, Leg.PREFILL, "P")
    (left,) = redis.zrange(f"{rooms.root}:queue:prefill", 0, -1)
    assert redis.hexists(pace, "since")
    rooms.cancel(left.decode())
    assert not redis.hexists(pace, "since")


def test_a_queue_that_something_is_left_in_keeps_its_pace(rooms: Rooms) -> None:
    redis: Any = rooms.redis
    for _ in range(3):
        rooms.submit(submission())
    taken = claim(rooms, Leg.PREFILL, "P")
    assert taken
    first, _ = redis.zrange(f"{rooms.root}:queue:prefill", 0, -1)
    rooms.cancel(first.decode())
    rooms.cancel(taken.claimed.hold.request_id)
    assert redis.hexists(f"{rooms.root}:pace", "since")


def test_a_list_comes_in_pages(rooms: Rooms) -> None:
    ids = [rooms.submit(submission()).request_id for _ in range(5)]
    rooms.cancel(ids[1])
    newest_first = ids[::-1]
    assert [r.request_id for r in rooms.list_requests(9)] == newest_first
    assert [r.request_id for r in rooms.list_requests(2)] == newest_first[:2]
    assert [r.request_id for r in rooms.list_requests(2, before=newest_first[1])] == newest_first[2:4]
    assert rooms.list_requests(2, before=ids[0]) == []
    assert rooms.list_requests(2, before="req_never") == []


def test_a_result_expires(server: RedisServer, model: str) -> None:
    rooms = Rooms(server.url, model, result_ttl_ms=50)
    reader = TokenReader(server.url, model)
    twin = submission("req_a", idempotency_key="k", body_hash="h")
    rooms.submit(twin)
    rooms.cancel("req_a")
    until(lambda: rooms.record("req_a") is None, "the record expires")
    assert rooms.list_requests(9) == []
    until(lambda: reader.read("req_a").end is None, "the stream expires")
    redis: Any = rooms.redis
    until(lambda: rooms.reap(1_000, 3) and not redis.zcard(f"{rooms.root}:requests"), "the index forgets it")
    check_integrity(rooms)
    again = submission("req_b", idempotency_key="k", body_hash="h")
    assert rooms.submit(again)[:3] == (SubmitOutcome.DUPLICATE, "req_a", []), "the key is remembered longer"
    rooms.close()
    reader.close()


@pytest.mark.parametrize("place", ["queued", "open", "published", "decode", "unified"])
def test_followers_learn_of_every_end(rooms: Rooms, server: RedisServer, model: str, place: str) -> None:
    scene = Scene(rooms, server, model)
    scene.reach(place)
    rooms.cancel(scene.id)
    reader = TokenReader(server.url, model)
    chunk = reader.read(scene.id)
    assert chunk.end
    assert chunk.end.state is State.CANCELLED
    assert len(chunk.tokens) == (2 if place == "decode" else 0)
    reader.close()


def test_cancel_or_finish_but_never_both(rooms: Rooms) -> None:
    """The first wins, and the other one learns so."""
    ids = [rooms.submit(submission()).request_id for _ in range(40)]
    holds = [got.claimed.hold for _ in ids if (got := claim(rooms, Leg.BOTH, "U"))]
    barrier = threading.Barrier(2)
    finished: dict[str, bool] = {}
    cancelled: dict[str, bool] = {}

    def finish() -> None:
        for hold in holds:
            barrier.wait()
            (emitted,) = rooms.emit([Emission(hold, 0, tokens(0, 1), Finish("length"))])
            finished[hold.request_id] = emitted.outcome is EmitOutcome.DONE

    def cancel() -> None:
        for hold in holds:
            barrier.wait()
            record = rooms.cancel(hold.request_id).record
            cancelled[hold.request_id] = record is not None and record.state is State.CANCELLED

    threads = [threading.Thread(target=target) for target in (finish, cancel)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for request_id in ids:
        assert finished[request_id] != cancelled[request_id]
        record = rooms.record(request_id)
        assert record
        assert record.state is (State.FINISHED if finished[request_id] else State.CANCELLED)
    check_integrity(rooms)
