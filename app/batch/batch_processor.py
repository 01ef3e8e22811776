"""`kvrelay batches`: works on batches, several at a time, until it is told to stop."""

import dataclasses
import logging
import secrets
import signal
import threading
from collections.abc import Callable
from typing import Any

from redis.exceptions import RedisError

from app.batch.batch_run import BatchRun, Stop
from app.batch.batch_spool import sweep_parts
from app.batch.file_sweep import sweep_expired, sweep_unfinished
from app.batch.line_threads import LineThreads
from app.gateway.errors import ApiError
from app.gateway.gateway import create_app
from app.gateway.loopback import Loopback
from app.gateway.service import KEY, Service
from relay.exposition import serve
from relay.log import event
from relay.settings import Settings

log = logging.getLogger(__name__)

MAX_BATCHES = 8
_LOOK_S = 0.5
_SWEEP_S = 60.0
_SPARE_THREADS = 64
_LINE_TTL_S = 600  # a result is copied at once; only who goes on after a dead processor reads it later


class BatchProcessor:
    """Any number of processes may run: a lease in Redis says whose a batch is."""

    def __init__(self, settings: Settings) -> None:
        threads = settings.batch_open_lines + _SPARE_THREADS  # a line waits as a client's stream does
        ttl_s = min(settings.result_ttl_s, _LINE_TTL_S)
        own = dataclasses.replace(settings, gateway_threads=2 * threads, result_ttl_s=ttl_s)
        app = create_app(own, role="batches")
        self._service: Service = app.extensions[KEY]
        self._loopback = Loopback(app)
        self._threads = LineThreads(settings.batch_open_lines)
        self._stopping = threading.Event()
        self._runs: dict[str, BatchRun] = {}
        self._lock = threading.Lock()

    def serve(self) -> None:
        """Until SIGTERM or SIGINT; then another process may go on with what is open, at once."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        renew_s = self._service.settings.lease_ms / 1000 / 3
        for what, every_s in (
            (self._renew, renew_s),
            (self._sweep_files, _SWEEP_S),
            (self._sweep_parts, _SWEEP_S),
        ):
            threading.Thread(target=self._repeat, args=(what, every_s), daemon=True).start()
        serve(self._service.meters.registry, self._service.settings)
        event(log, "ready", open_lines=self._service.settings.batch_open_lines)
        self._repeat(self._claim, _LOOK_S)
        self._leave()

    def _on_signal(self, *_: Any) -> None:
        self._stopping.set()

    def _repeat(self, what: Callable[[], None], every_s: float) -> None:
        """Also after what nobody expected: a thread that ended here would be missed by nobody."""
        failing = False
        while not self._stopping.is_set():
            try:
                what()
                failing = False
            except Exception as error:
                if not failing:
                    event(log, "processor_waits", logging.WARNING, what=what.__name__, error=error)
                    if not isinstance(error, (RedisError, ApiError)):
                        log.exception("processor_failed")
                failing = True
            self._stopping.wait(every_s)

    def _claim(self) -> None:
        if len(self._running()) >= MAX_BATCHES:
            return
        nonce = secrets.token_hex(16)
        batch = self._service.batches.claim(nonce, self._service.settings.lease_ms)
        if batch is None:
            return
        event(log, "batch_claimed", batch=batch.batch_id, status=batch.status)
        run = BatchRun(self._service, self._loopback, batch, nonce, self._threads)
        with self._lock:
            self._runs[batch.batch_id] = run
        threading.Thread(target=self._run, args=(run,), daemon=True, name=batch.batch_id).start()

    def _run(self, run: BatchRun) -> None:
        try:
            run.run()
        except Exception as error:
            run.stop(Stop.LOST)
            event(log, "batch_waits", logging.WARNING, batch=run.batch_id, error=error)
        finally:
            with self._lock:
                if self._runs.get(run.batch_id) is run:
                    del self._runs[run.batch_id]

    def _running(self) -> list[BatchRun]:
        with self._lock:
            return list(self._runs.values())

    def _renew(self) -> None:
        for run in self._running():
            run.renew()

    def _sweep_parts(self) -> None:
        sweep_parts(self._service)

    def _sweep_files(self) -> None:
        sweep_expired(self._service)
        sweep_unfinished(self._service)

    def _leave(self) -> None:
        """The threads of open lines end with the process; their requests go on, and their keys find them."""
        for run in self._running():
            run.stop(Stop.ENDING)
            try:
                run.release()
            except RedisError as error:
                event(log, "release_failed", logging.WARNING, batch=run.batch_id, error=error)
