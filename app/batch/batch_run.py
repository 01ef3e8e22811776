"""One batch, from its input file to its results."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from functools import partial
from typing import TypeVar

from app.batch.batch_input import Call, Checked, InputLine, check, is_done, parse_line, read_lines
from app.batch.batch_result import Result, answered, result_id, unanswered
from app.batch.batch_spool import Spool
from app.batch.line_threads import LineThreads
from app.gateway.line import Line
from app.gateway.loopback import Loopback, Reply
from app.gateway.service import Service
from relay.batches import Batch, BatchError, BatchStatus
from relay.log import event
from relay.redis_client import AWAY

log = logging.getLogger(__name__)

_LINE_EXTRA_BYTES = 1 << 16  # what a line may hold beside the body
_RETRY_S = 1.0
_TICK_S = 0.2
_FIRST_WAIT_S, _MOST_WAIT_S = 0.5, 8.0  # while the system is full or has no workers
_MAX_TRIES = 5
_SLACK_S = 0.5
# Redis lost the request, or its result expired before anybody read it: it runs again, under another key.
_LOST = ("request_lost", "stream_lost", "stream_diverged")
_PASSES = (429, 503)
_CUT_OFF = ("client_gone", "timeout")

Answer = TypeVar("Answer")


class Stop(StrEnum):
    """Why no further line is begun."""

    CANCELLED = "cancelled"
    EXPIRED = "expired"
    LOST = "lost"  # another processor works on the batch
    ENDING = "ending"  # this process ends


_ENDING = {Stop.CANCELLED: BatchStatus.CANCELLED, Stop.EXPIRED: BatchStatus.EXPIRED}
_UNFINISHED = {
    Stop.CANCELLED: ("batch_cancelled", "The batch was cancelled before this line was finished."),
    Stop.EXPIRED: ("batch_expired", "The batch expired before this line was finished."),
}
_FAILED = ("internal_error", "The processor failed at this line; its log says why.")


class Left(Exception):
    """This process has nothing more to do with the batch."""


class BatchRun:
    """What one processor does for one batch. One thread calls `run`, any other the rest.

    The result of a line is kept the moment it is there, and `threads` bounds how many are open, over all
    batches of the process. Whoever goes on after a processor was killed repeats the lines that were open,
    under the same idempotency keys: their requests are found, not made again.
    """

    def __init__(
        self, service: Service, loopback: Loopback, batch: Batch, nonce: str, threads: LineThreads
    ) -> None:
        self.batch_id = batch.batch_id
        self._service = service
        self._loopback = loopback
        self._batch = batch
        self._nonce = nonce
        self._spool = Spool(service, batch.batch_id, nonce)
        self._threads = threads
        self._running = 0
        self._changed = threading.Condition()
        self._why: Stop | None = None
        self._stopping = threading.Event()
        self._expires_at = 0.0  # by this process's clock; every renewal says when

    def run(self) -> None:
        """Until the batch has ended or is not ours any more. Raises ApiError when the storage is away."""
        try:
            self._persist(self.renew)
            if self._batch.status is BatchStatus.VALIDATING and not self._validate():
                return
            if self._batch.ending is None:
                self._run_lines()
            self._close()
        except FileNotFoundError:
            self._reject([BatchError("file_lost", "The storage has lost the input file.")])
        except Left:
            event(log, "batch_left", batch=self.batch_id, why=self._why)

    def renew(self) -> None:
        """Keep the batch, and learn what was decided about it. Raises RedisError."""
        renewed = self._service.batches.renew(self.batch_id, self._nonce, self._service.settings.lease_ms)
        if renewed is None:
            self.stop(Stop.LOST)
            return
        status, left_s = renewed
        self._expires_at = time.monotonic() + left_s
        if status is BatchStatus.CANCELLING:
            self.stop(Stop.CANCELLED)
        elif left_s <= 0:
            self.stop(Stop.EXPIRED)

    def stop(self, why: Stop) -> None:
        """Begin no further line. What takes the batch from us counts more than what was decided before."""
        if self._why is None or why not in _ENDING:
            self._why = why
        self._stopping.set()

    def release(self) -> None:
        """Let another processor go on at once. Raises RedisError."""
        self._service.batches.release(self.batch_id, self._nonce)

    # ---- input

    def _validate(self) -> bool:
        """False: the batch has failed."""
        checked = self._check()
        if self._why is None and checked.errors:
            self._reject(checked.errors)
            return False
        if self._why is None:
            self._keep_ours(lambda: self._service.batches.start(self.batch_id, self._nonce, checked.total))
            event(log, "batch_started", batch=self.batch_id, lines=checked.total)
        return True

    def _check(self) -> Checked:
        limit_bytes = self._service.settings.max_file_bytes
        file = self._persist(lambda: self._service.files.find(self._batch.input_file_id))
        if file is None:
            return Checked(0, [BatchError("file_not_found", "The input file has been deleted.")])
        if file.size_bytes > limit_bytes:
            message = f"The input file is larger than {limit_bytes} bytes."
            return Checked(0, [BatchError("file_too_large", message)])
        return check(self._until_stopped(self._lines()), self._batch.endpoint)

    def _reject(self, errors: list[BatchError]) -> None:
        self._persist(lambda: self._service.batches.reject(self.batch_id, self._nonce, errors))
        event(log, "batch_failed", batch=self.batch_id, code=errors[0].code, line=errors[0].line)

    def _lines(self) -> Iterator[InputLine]:
        pieces = self._service.storage.read(f"files/{self._batch.input_file_id}")
        return read_lines(pieces, self._service.settings.max_body_bytes + _LINE_EXTRA_BYTES)

    def _until_stopped(self, lines: Iterable[InputLine]) -> Iterator[InputLine]:
        """Ends early when no further line is to be begun. Raises Left when the batch is not ours any more."""
        for line in lines:
            if self._stopping.is_set():
                self._check_ours()
                return
            yield line

    # ---- lines

    def _run_lines(self) -> None:
        """Until each line has its result."""
        done = self._persist(lambda: self._service.batches.done(self.batch_id))
        for line in self._until_stopped(self._lines()):
            if not is_done(done, line.number) and self._take_turn():
                self._threads.run(partial(self._answer, line))
        with self._changed:
            while self._running:
                self._check_ours()
                self._changed.wait(_TICK_S)
        self._check_ours()
        if self._why is not None:
            self._give_up_rest(*_UNFINISHED[self._why])

    def _take_turn(self) -> bool:
        """Wait until one more line may be open. False: no further line is to be begun."""
        while not self._threads.take(_TICK_S):
            if self._stopping.is_set():
                return False
        with self._changed:
            self._running += 1
        return True

    def _answer(self, line: InputLine) -> None:
        """One line, in a thread of its own."""
        try:
            result = self._result(line)
            self._keep_ours(lambda: self._spool.keep(line.number, result))
        except Left:
            pass
        except Exception:
            log.exception("result_not_kept")
            self.stop(Stop.LOST)  # who claims the batch next, after this lease, tries again
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify()

    def _result(self, line: InputLine) -> Result:
        call = parse_line(line, self._batch.endpoint)
        its_id = result_id(self.batch_id, line.number)
        try:
            reply = self._reply(line.number, call)
        except Exception:  # tried again, it would fail again, and the batch would never end
            log.exception("line_failed")
            return unanswered(its_id, call.custom_id, *_FAILED)
        if (reply is None or reply.error_code in _CUT_OFF) and (why := self._why_cut_off()):
            return unanswered(its_id, call.custom_id, *_UNFINISHED[why])
        if reply is None:
            raise Left
        return answered(its_id, call.custom_id, reply)

    def _why_cut_off(self) -> Stop | None:
        """None: not by the end of the batch. Its lines time out with it, before a renewal may tell that."""
        if self._why in _UNFINISHED:
            return self._why
        return Stop.EXPIRED if self._why is None and time.monotonic() > self._expires_at - _SLACK_S else None

    def _reply(self, number: int, call: Call) -> Reply | None:
        """None: stopped before there was one."""
        tries, wait_s = 1, _FIRST_WAIT_S
        while not self._stopping.is_set():
            line = Line(self._batch.owner, max(1.0, self._expires_at - time.monotonic()), self._abandoned)
            key = f"{self.batch_id}:{number}:{tries}"
            reply = self._loopback.post(self._batch.endpoint, call.body, key, line)
            if reply.status in _PASSES:
                self._stopping.wait(max(wait_s, reply.retry_after_s or 0.0))
                wait_s = min(2 * wait_s, _MOST_WAIT_S)
            elif reply.error_code in _LOST and tries < _MAX_TRIES:
                tries += 1
            else:
                return reply
        return None

    def _abandoned(self) -> bool:
        """Nobody wants the open lines any more."""
        return self._why in _UNFINISHED

    def _give_up_rest(self, code: str, message: str) -> None:
        """A result for each line that has none, if the file was ever checked."""
        batch = self._persist(lambda: self._service.batches.find(self.batch_id))
        if batch is None or batch.total is None:
            return
        done = self._persist(lambda: self._service.batches.done(self.batch_id))
        for line in self._lines():
            self._check_ours()
            if not is_done(done, line.number):
                custom_id = parse_line(line, self._batch.endpoint).custom_id
                result = unanswered(result_id(self.batch_id, line.number), custom_id, code, message)
                self._keep_ours(partial(self._spool.keep, line.number, result))

    def _close(self) -> None:
        ending = BatchStatus.COMPLETED if self._why is None else _ENDING[self._why]
        self._keep_ours(lambda: self._spool.close(ending))
        event(log, "batch_ended", batch=self.batch_id)

    # ---- Redis

    def _persist(self, call: Callable[[], Answer]) -> Answer:
        """Its answer, once Redis is there. Raises Left when this process is to end before."""
        while True:
            try:
                return call()
            except AWAY as error:
                event(log, "redis_away", logging.WARNING, batch=self.batch_id, error=error)
                self._check_ours()
                time.sleep(_RETRY_S)

    def _keep_ours(self, call: Callable[[], bool]) -> None:
        """`call` answers whether the batch is still ours. Raises Left when it is not."""
        if not self._persist(call):
            self.stop(Stop.LOST)
            raise Left

    def _check_ours(self) -> None:
        if self._why in (Stop.LOST, Stop.ENDING):
            raise Left
