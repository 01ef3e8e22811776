"""EnginePool: the Celery pool whose tasks are legs of requests, run by one engine.

A task handed to the pool is a doorbell. It becomes STARTED at once, stays so while its leg runs, and ends
when the engine host says so. Celery finds the pool by `-P custom` and CELERY_CUSTOM_WORKER_POOL.
"""

import atexit
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from celery import signals
from celery.concurrency.base import BasePool
from celery.worker import state
from celery.worker.request import Request

from relay.celery import LEG_OF_TASK, RUNG_AT
from relay.functions import UnsupportedServer
from relay.log import event
from workers.doorbell import Doorbell, TaskHandle
from workers.task import Task, announce_end, introduction

log = logging.getLogger(__name__)

_DRAIN_POLL_S = 0.02

_celery_worker: Any = None  # Celery's own object of this process: a pool is not told of it


@signals.celeryd_init.connect
def _remember(instance: Any, **_: Any) -> None:
    global _celery_worker
    _celery_worker = instance


class EngineHost(Protocol):
    """What runs the legs. Every call comes from the hub thread and none may block, but `start` and `stop`."""

    def start(self, name: str) -> None:
        """Return when the model is loaded and warm, the threads run and the worker is registered."""

    def ring(self, bell: Doorbell) -> None:
        """Queue a credit to claim one leg; no I/O."""

    def abort(self, task: TaskHandle) -> None:
        """Cancel the request whose leg this task runs: somebody pressed Terminate."""

    def capacity(self) -> int:
        """Running tasks plus how many more could be taken now; never below what is running, at least 1."""

    def stats(self) -> dict[str, Any]:
        """State and counters of the engine, for `celery inspect stats` and Flower; plain JSON, flat."""

    def flush_cache(self) -> int:
        """Forget the prefix cache before the next step. How many pages it has now."""

    def drain(self) -> None:
        """Stop claiming, hand back what is queued, finish what runs within the grace period."""

    def hand_back(self) -> None:
        """Hand everything back now."""

    def idle(self) -> bool:
        """The drain is over: nothing is owned and nothing is in flight."""

    def stop(self) -> None:
        """Close the mailbox last, deregister, join the threads."""


class EnginePool(BasePool):  # type: ignore[misc]
    """Hands doorbells to an EngineHost and ends their Celery tasks when the host says so.

    Ends, and beginnings of forks, arrive from the host's threads in a queue of their own, because the hub's
    ready callbacks have no order, and are applied on the hub thread: by the hub while it runs, by `on_stop`
    after that.
    """

    signal_safe = False
    body_can_be_buffer = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._host: EngineHost | None = None
        self._hub: Any = None
        self._running: set[Task] = set()  # Celery itself keeps only a weak reference
        self._changes: deque[Callable[[], None]] = deque()
        self._forks: dict[str, Task] = {}  # by task id, while Celery hands them over
        self._signals = 0
        self._stopping = False

    def make_host(self) -> EngineHost:
        """The engine of this process."""
        from workers.worker import Worker

        return Worker()

    def on_start(self) -> None:
        _, name = self.options["initargs"]
        host = self.make_host()
        try:
            host.start(name)
        except (ValueError, OSError, UnsupportedServer) as error:
            event(log, "worker_start_failed", logging.CRITICAL, error=error)
            raise SystemExit(os.EX_CONFIG) from error
        self._host = host
        signals.worker_shutting_down.connect(self._on_signal)

    def register_with_event_loop(self, hub: Any) -> None:
        """Called again after each reconnect, so what ended while Redis was away is applied then."""
        self._hub = hub
        hub.call_soon(self._apply)

    def on_apply(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        callback: Callable[..., Any],
        accept_callback: Callable[..., Any],
        **_: Any,
    ) -> Task:
        """Accept a doorbell, or a fork, whose leg is there already. Whatever goes wrong ends this task: an
        exception here would end the worker."""
        request: Request = callback.__self__  # type: ignore[attr-defined]
        fork = self._forks.pop(request.id, None)
        task = fork or Task(self, request)
        self._running.add(task)
        request.acknowledged = True  # the consumer takes messages without: see relay/celery.py
        try:
            accept_callback(os.getpid(), time.monotonic())
            if fork is None:
                self._ring(task)
        except Exception as error:
            log.exception("doorbell_failed task=%s", request.id)
            task.fail(repr(error))
        return task

    def _ring(self, task: Task) -> None:
        # `name` is whatever the sender chose to show; `type` is the task.
        leg = LEG_OF_TASK.get(task.request.type)
        if leg is None:
            return task.fail(f"{task.request.type} does not run here, only {', '.join(LEG_OF_TASK)}")
        match task.request.args:
            case [str(request_id)]:
                assert self._host is not None
                self._host.ring(Doorbell(request_id, leg, task, _rung_at(task)))
            case _:
                task.fail("a doorbell takes one argument, the request id")

    def abort(self, task: Task) -> None:
        """Cancel the request behind a task that was revoked; Celery has already announced REVOKED."""
        assert self._host is not None
        try:
            self._host.abort(task)
        except Exception:
            log.exception("abort_failed task=%s", task.request.id)

    def flush_cache(self) -> int:
        """See EngineHost."""
        assert self._host is not None
        return self._host.flush_cache()

    def begin(self, task: Task) -> None:
        """Let Celery know a fork; callable from any thread."""
        self._change(partial(self._begin, task))

    def complete(self, task: Task, result: str, failed: bool) -> None:
        """End a task; callable from any thread. One that has ended already is ignored."""
        self._change(partial(self._complete, task, result, failed))

    def _change(self, change: Callable[[], None]) -> None:
        self._changes.append(change)
        if self._hub is not None:
            self._hub.call_soon(self._apply)

    def _apply(self) -> None:
        while self._changes:
            self._changes.popleft()()

    def _begin(self, task: Task) -> None:
        request = task.request
        self._forks[request.id] = task
        try:
            state.task_reserved(request)
            request.send_event("task-received", **introduction(request))
            request.execute_using_pool(self)
        except Exception:
            log.exception("fork_failed task=%s", request.id)
            self._forks.pop(request.id, None)

    def _complete(self, task: Task, result: str, failed: bool) -> None:
        if task not in self._running:
            return
        self._running.remove(task)
        try:
            announce_end(task.request, result, failed)
        except Exception:
            log.exception("task_end_failed task=%s", task.request.id)

    def _on_signal(self, **_: Any) -> None:
        """Runs inside the signal handler, so it only counts."""
        self._signals += 1

    def _hurried(self) -> bool:
        """A cold shutdown, or asked to stop a second time: hand back instead of finishing."""
        return bool(state.should_terminate) or self._signals > 1

    def on_close(self) -> None:
        if self._host is not None:
            self._host.drain()

    def on_stop(self) -> None:
        """Wait until the drain is over, then stop the host."""
        # Celery also calls this inside a signal handler, before `close` or while this waits below. A handler
        # may have interrupted a call into the host, so nothing is done there; Celery calls again after it.
        if self._stopping or self._state == self.RUN:
            return
        self._stopping = True
        if self._host is not None:
            self._wait(self._host)
            self._host.stop()
            atexit.register(self._leave)
        self._apply()

    def _leave(self) -> None:
        """The last act of a process whose host has stopped. Taking the interpreter apart around native
        libraries has been seen to run for ever in the garbage collector, and nothing is left to do."""
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(getattr(_celery_worker, "exitcode", None) or os.EX_OK)

    def _wait(self, host: EngineHost) -> None:
        told = False
        while not host.idle():
            if self._hurried() and not told:
                told = True
                host.hand_back()
            self._apply()
            time.sleep(_DRAIN_POLL_S)

    def on_terminate(self) -> None:
        self.on_stop()

    def terminate_job(self, pid: int, signal: int | None = None) -> None:
        """Nothing: a leg is no process. Celery calls Task.terminate as well, which does the work."""

    @property
    def num_processes(self) -> int:
        """How many tasks Celery may hand over in all; asked before each read of the queue."""
        return self.limit if self._host is None else max(1, self._host.capacity())

    def _get_info(self) -> dict[str, Any]:
        info: dict[str, Any] = super()._get_info()
        info["max-concurrency"] = self.num_processes
        info["tasks"] = len(self._running)
        return info | (self._host.stats() if self._host is not None else {})  # Flower shows a row for each


def _rung_at(task: Task) -> float:
    """Whoever sends a message may put anything into it."""
    told = task.request.request_dict.get(RUNG_AT)
    return float(told) if isinstance(told, int | float) else 0.0
