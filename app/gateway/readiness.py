"""Could a request be served now? Looked at in the background: who asks waits for nothing but the answer."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from redis import Redis
from redis.exceptions import RedisError

from app.gateway.admission import missing
from relay.protocol import ProtocolMismatch
from relay.worker_card import WorkerCard

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
STALE_S = 2.0  # a look that takes longer says that Redis is away


class Verdict(NamedTuple):
    """What is missing, as it was `age_ms` ago."""

    missing: list[str]
    age_ms: float


class Seen(NamedTuple):
    """`at_s`: when the look began, by the clock of Readiness."""

    missing: list[str]
    at_s: float


class Readiness:
    """Thread-safe. Begins to look when it is first asked: most processes never are."""

    def __init__(
        self,
        probe: Redis,
        workers: Callable[[], Sequence[WorkerCard]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._probe = probe
        self._workers = workers
        self._clock = clock
        self._lock = threading.Lock()
        self._looking = False
        self._closing = threading.Event()
        self._seen = Seen([], -STALE_S)

    def verdict(self) -> Verdict:
        if not self._looking:
            with self._lock:
                if not self._looking:
                    self.look()
                    threading.Thread(target=self._run, daemon=True, name="readiness").start()
                    self._looking = True
        seen = self._seen
        age_s = self._clock() - seen.at_s
        return Verdict(seen.missing if age_s < STALE_S else ["redis"], 1000 * age_s)

    def look(self) -> None:
        began_s = self._clock()
        self._seen = Seen(self._ask(), began_s)

    def close(self) -> None:
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.wait(LOOK_EVERY_S):
            try:
                self.look()
            except Exception:  # nobody would miss this thread, and the gateway would not be ready again
                log.exception("look_failed")

    def _ask(self) -> list[str]:
        try:
            self._probe.ping()
            return [f"{kind} worker" for kind in missing(self._workers())]
        except RedisError:
            return ["redis"]
        except ProtocolMismatch as error:
            return [f"gateway of protocol {error.found}"]
