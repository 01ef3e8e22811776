"""The output thread: tokens of all legs become text and go to the server, one call per engine step."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from relay.answers import Emission, EmitOutcome, Emitted
from relay.log import event
from relay.redis_client import AWAY
from relay.request import Claimed, Ring
from relay.rooms import Rooms
from relay.tokenizer import Tokenizer
from workers.engine.messages import Crashed, Produced
from workers.meters import Meters
from workers.outbox import Outbox

log = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 1.0
_STOP_TIMEOUT_S = 5.0


class Open(NamedTuple):
    """Put before the engine hears of the leg: tokens of a key that is not open are ignored."""

    key: str
    claimed: Claimed


class Close(NamedTuple):
    """Nothing more comes from this leg. Answers Closed once what came before is emitted, unless the leg ends
    otherwise first. A key that is not open is ignored."""

    key: str


class _Stop(NamedTuple):
    deadline: float  # monotonic seconds


Message = Open | Close | Sequence[Produced]


class Finished(NamedTuple):
    """The record has the end of the request: `reason` is stop or length. The engine may still run the leg.
    `rings` for the forks that nobody claimed beside it."""

    key: str
    reason: str
    rings: tuple[Ring, ...] = ()


class Lost(NamedTuple):
    """The leg is no longer ours: drop it. With `error` it is ours, and cannot go on here: give it back."""

    key: str
    error: str | None = None


class Closed(NamedTuple):
    """Everything the leg produced before Close is emitted."""

    key: str


Outcome = Finished | Lost | Closed


class OutputThread:
    """Other threads call `start`, `put` and `stop`; none of them ever waits for the server here.

    While the server is away everything is kept and sent again, in order: emitting a token twice is harmless,
    since its position names it. `on_outcome` is called on this thread.
    """

    def __init__(
        self,
        rooms: Rooms,
        tokenizer: Tokenizer,
        on_outcome: Callable[[Outcome | Crashed], None],
        meters: Meters,
    ) -> None:
        self._rooms = rooms
        self._tokenizer = tokenizer
        self._on_outcome = on_outcome
        self._meters = meters
        self._inbox: queue.SimpleQueue[Message | _Stop] = queue.SimpleQueue()
        self._outboxes: dict[str, Outbox] = {}
        self._closing: set[str] = set()
        self._retry_at = 0.0  # monotonic seconds, while the server is away
        self._retry_s = _FIRST_RETRY_S
        self._stop_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, message: Message) -> None:
        """Open, Close, or what one engine step produced."""
        self._inbox.put(message)

    def stop(self, timeout_s: float = _STOP_TIMEOUT_S) -> None:
        """Emit what was put before, for at most `timeout_s`, and end the thread."""
        self._inbox.put(_Stop(time.monotonic() + timeout_s))
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:
            log.exception("output_crashed")
            self._on_outcome(Crashed(error))

    def _loop(self) -> None:
        while self._stop_at is None or (self._pending and time.monotonic() < self._stop_at):
            self._receive()
            if time.monotonic() >= self._retry_at:
                self._emit([key for key, outbox in self._outboxes.items() if outbox.pending])
            self._report_closed()
        if self._pending:
            event(log, "output_unsent", logging.WARNING, legs=len(self._outboxes))

    @property
    def _pending(self) -> bool:
        return any(outbox.pending for outbox in self._outboxes.values())

    # What comes in

    def _receive(self) -> None:
        """Take all that is queued; wait for it only while there is nothing to send, or nobody to take it."""
        timeout = max(0.0, self._retry_at - time.monotonic()) if self._pending else None
        try:
            self._handle(self._inbox.get(timeout=timeout))
            while True:
                self._handle(self._inbox.get_nowait())
        except queue.Empty:
            return

    def _handle(self, message: Message | _Stop) -> None:
        match message:
            case Open():
                self._open(message)
            case Close():
                if message.key in self._outboxes:
                    self._closing.add(message.key)
            case _Stop():
                self._stop_at = message.deadline
            case _:
                for produced in message:
                    self._add(produced)

    def _open(self, message: Open) -> None:
        try:
            self._outboxes[message.key] = Outbox(self._tokenizer, message.claimed)
        except Exception as error:
            self._lose(message.key, error)

    def _add(self, produced: Produced) -> None:
        outbox = self._outboxes.get(produced.key)
        if outbox is None or produced.key in self._closing:
            return
        try:
            outbox.add(produced)
        except Exception as error:
            self._lose(produced.key, error)

    # What goes out

    def _emit(self, keys: Sequence[str]) -> None:
        """One call for all these legs."""
        if not keys:
            return
        batch = [self._outboxes[key].emission() for key in keys]
        try:
            answers = self._rooms.emit(batch)
        except AWAY as error:
            event(log, "redis_away", logging.WARNING, error=error, legs=len(keys), retry_s=self._retry_s)
            self._retry_at = time.monotonic() + self._retry_s
            self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)
            return
        except Exception as error:
            self._emit_apart(keys, error)
            return
        self._retry_s = _FIRST_RETRY_S
        now = time.monotonic()
        for key, emission, answer in zip(keys, batch, answers, strict=True):
            self._measure(self._outboxes[key], emission, answer, now)
            self._answer(key, emission, answer)

    def _emit_apart(self, keys: Sequence[str], error: Exception) -> None:
        """A call that fails because of one leg must not hold up the others."""
        if len(keys) == 1:
            self._lose(keys[0], error)
            return
        for key in keys:
            self._emit([key])
            if time.monotonic() < self._retry_at:  # the server went away: the rest waits with this one
                return

    def _measure(self, outbox: Outbox, emission: Emission, answer: Emitted, now: float) -> None:
        if answer.outcome not in (EmitOutcome.OK, EmitOutcome.DONE):
            return
        if emission.tokens:
            self._meters.emitted(len(emission.tokens), outbox.since_s(now))
        if answer.milestone is not None:
            self._meters.reached(answer.milestone)
        if emission.finish is not None:
            self._meters.finished(emission.finish.reason)

    def _answer(self, key: str, emission: Emission, answer: Emitted) -> None:
        if answer.outcome is EmitOutcome.STALE:
            self._end(Lost(key))
        elif answer.outcome is EmitOutcome.DONE and emission.finish is not None:
            self._end(Finished(key, emission.finish.reason, answer.rings))
        else:
            try:
                self._outboxes[key].answer(emission, answer)
            except ValueError as error:
                self._lose(key, error)

    def _report_closed(self) -> None:
        for key in [key for key in self._closing if not self._outboxes[key].pending]:
            self._end(Closed(key))

    # How a leg ends

    def _lose(self, key: str, error: Exception) -> None:
        told = f"{type(error).__name__}: {error}"
        event(log, "output_lost", logging.ERROR, leg=key, error=told)
        self._end(Lost(key, told))

    def _end(self, outcome: Outcome) -> None:
        self._outboxes.pop(outcome.key, None)
        self._closing.discard(outcome.key)
        self._on_outcome(outcome)
