"""What must hold whatever happens: streams without gaps, the undisturbed texts, quick recovery, no leaks."""

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from redis.exceptions import RedisError

from relay.request import State
from relay.tokens import TokenReader
from tests.chaos.cluster import Cluster
from tests.integration.scene import check_integrity
from tests.integration.until import until

LOOK_EVERY_S = 0.03
FREED_WITHIN_S = 4.5  # a lease of three seconds, half a second between two looks at it, and one to spare
CLAIMED_WITHIN_S = 5.0  # as soon as a worker has room, and the machine time for it


class Text(NamedTuple):
    """How a request ended."""

    state: State
    text: str
    finish_reason: str | None
    token_ids: tuple[int, ...]


class Watch:
    """Follows the streams of some requests, on a thread, and notes everything that must not happen."""

    def __init__(self, cluster: Cluster, request_ids: Iterable[str]) -> None:
        self.problems: list[str] = []
        self.ended: dict[str, Text] = {}
        self._cluster = cluster
        self._ids = list(request_ids)
        self._seen: dict[str, list[int]] = {request_id: [] for request_id in self._ids}
        self._reader = TokenReader(cluster.server.url, cluster.model)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def emitted(self) -> int:
        return sum(map(len, self._seen.values()))

    def all_ended(self, deadline_s: float) -> dict[str, Text]:
        """Every request's end, once all have one."""
        try:
            until(lambda: len(self.ended) == len(self._ids), "every request has ended", deadline_s)
        except AssertionError as error:
            open_ids = [request_id for request_id in self._ids if request_id not in self.ended]
            records = "\n".join(str(self._cluster.rooms.record(i)) for i in open_ids[:4])
            raise AssertionError(f"{error}; {len(open_ids)} are open, such as\n{records}") from None
        finally:
            self.close()
        return self.ended

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._reader.close()

    def _run(self) -> None:
        while not self._closing.wait(LOOK_EVERY_S):
            for request_id in self._ids:
                if request_id not in self.ended:
                    try:
                        self._look(request_id)
                    except RedisError:
                        continue

    def _look(self, request_id: str) -> None:
        """Read the whole stream, so that what was once seen must still be there."""
        chunk = self._reader.read(request_id)
        ids = [token.token_id for token in chunk.tokens]
        if [token.position for token in chunk.tokens] != list(range(len(ids))):
            self._note(f"{request_id}: positions {[token.position for token in chunk.tokens]}")
        seen = self._seen[request_id]
        # After a restart the server may lack its last second until the owner sends it again.
        if ids[: len(seen)] != seen[: len(ids)]:
            self._note(f"{request_id}: {seen} was seen, then {ids}")
        if len(ids) > len(seen):
            self._seen[request_id] = ids
        if chunk.end is not None:
            text = "".join(token.text for token in chunk.tokens) + chunk.end.text
            self.ended[request_id] = Text(chunk.end.state, text, chunk.end.finish_reason, tuple(ids))

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


class Recovery(NamedTuple):
    """A leg that a dead worker owned. Seconds from the death until it was in its queue again, and from then
    until somebody claimed it, or the request ended; 0 and all of them where it ended before."""

    request_id: str
    leg: str
    freed_s: float
    waited_s: float

    @property
    def seconds(self) -> float:
        """From the death until it went on."""
        return self.freed_s + self.waited_s


def orphans(cluster: Cluster, boot: str) -> dict[str, str]:
    """request id -> leg, of what a worker owns by the record."""
    owned: Any = cluster.rooms.redis.hgetall(f"{cluster.rooms.root}:legs:{boot}")
    return dict(member.decode().rsplit("/", 1) for member in owned.values())


def recoveries(
    cluster: Cluster, owned: dict[str, str], died_at: float, deadline_s: float = 30.0
) -> list[Recovery]:
    """Wait until each of these legs is claimed again."""
    found: dict[str, Recovery] = {}
    deadline = time.monotonic() + deadline_s
    while len(found) < len(owned):
        assert time.monotonic() < deadline, f"not claimed again: {owned.keys() - found.keys()}"
        for request_id in owned.keys() - found.keys():
            record = cluster.rooms.record(request_id)
            assert record is not None
            times = record.timings
            claims = (times.claimed, times.decode_claimed if owned[request_id] == "decode" else 0.0)
            later = [at for at in (*claims, times.ended) if at > died_at * 1e3]
            if later:
                freed_at = _freed_at(cluster, request_id, died_at) or died_at
                found[request_id] = Recovery(
                    request_id, owned[request_id], freed_at - died_at, min(later) / 1e3 - freed_at
                )
        time.sleep(0.01)
    return list(found.values())


def _freed_at(cluster: Cluster, request_id: str, died_at: float) -> float | None:
    """By a lease that ended, or before that by a peer that cannot reach it."""
    timeline = cluster.rooms.timeline(request_id)
    assert timeline
    freed = (entry.at_ms / 1e3 for entry in timeline.entries if entry.name == "released")
    return next((at for at in freed if at > died_at), None)


def compare(found: Sequence[Text], expected: Sequence[Text]) -> list[str]:
    """How the texts differ from those of the undisturbed run."""
    return [
        f"request {i}: {got.state} {got.finish_reason} {got.text!r} instead of {want.text!r}"
        for i, (got, want) in enumerate(zip(found, expected, strict=True))
        if got != want
    ]


class Idle(NamedTuple):
    """The page accounts of one worker."""

    name: str
    free: int
    cached: int
    held: int
    quarantined: int
    total: int


def page_accounts(cluster: Cluster) -> list[Idle]:
    return [
        Idle(
            card.name,
            card.load.free_pages,
            card.load.cached_pages,
            card.load.held_pages,
            card.load.quarantined_pages,
            card.geometry.pages,
        )
        for card in cluster.cards()
    ]


def leaks(cluster: Cluster, deadline_s: float = 15.0) -> list[str]:
    """What is still held or owned although nothing is open; waits for renewals and proofs to come."""
    deadline = time.monotonic() + deadline_s
    while problems := _leaks(cluster):
        if time.monotonic() > deadline:
            return problems
        time.sleep(0.1)
    check_integrity(cluster.rooms)
    return []


def _leaks(cluster: Cluster) -> list[str]:
    alive = {worker.pid for worker in cluster.workers if worker.alive}
    problems = []
    for card in cluster.cards():
        if card.incarnation.pid not in alive:
            continue
        load, total = card.load, card.geometry.pages
        if load.held_pages or load.quarantined_pages or load.free_pages + load.cached_pages != total:
            problems.append(f"{card.name}: {load} of {total} pages")
    for pattern in ("legs:*", "queue:*", "lease", "retracted:*"):
        problems += cluster.keys(pattern)
    redis: Any = cluster.rooms.redis
    for room in cluster.keys("room:*"):
        if redis.hget(room, "state") != b"ended":
            problems.append(room)
    return problems
