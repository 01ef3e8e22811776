"""A running Celery task, as Celery itself keeps it: the leg of a request."""

import secrets
import time
from typing import Any, Protocol

from celery.worker import state
from celery.worker.request import Request

from relay.celery import LEG_OF_TASK


class Tasks(Protocol):
    """Those that run here: EnginePool. Every call may come from any thread, but `abort` from the hub's."""

    def begin(self, task: "Task") -> None: ...

    def complete(self, task: "Task", result: str, failed: bool) -> None: ...

    def abort(self, task: "Task") -> None: ...


class Task:
    """`succeed`, `fail` and `fork` may come from any thread; the first end counts."""

    def __init__(self, tasks: Tasks, request: Request) -> None:
        self._tasks = tasks
        self.request = request

    def succeed(self, result: str) -> None:
        self._tasks.complete(self, result, failed=False)

    def fail(self, error: str) -> None:
        self._tasks.complete(self, error, failed=True)

    def fork(self, request_id: str) -> "Task":
        task = Task(self._tasks, beside(self.request, request_id))
        self._tasks.begin(task)
        return task

    def terminate(self, signal: int | None = None) -> None:
        """Celery's word for both a revoke and a cold shutdown; the latter cancels no request of a client."""
        if not self.request._already_cancelled:
            self._tasks.abort(self)


def beside(request: Request, request_id: str) -> Request:
    """A task as if its message had come after that of `request`; only the leg's request is another."""
    task_id = f"{request_id}:{LEG_OF_TASK[request.type]}:{secrets.token_hex(4)}"
    return type(request)(
        request.message,
        body=((request_id,), {}, {}),
        headers={
            "id": task_id,
            "task": request.type,
            "root_id": request.root_id,
            "parent_id": request.id,
            "argsrepr": f"({request_id!r},)",
            "kwargsrepr": "{}",
        },
        decoded=True,
        app=request.app,
        task=request.task,
        hostname=request.hostname,
        eventer=request.eventer,
        connection_errors=request.connection_errors,
    )


def introduction(request: Request) -> dict[str, Any]:
    """What Celery tells of a task whose message has come."""
    return {
        "name": request.name,
        "args": request.argsrepr,
        "kwargs": request.kwargsrepr,
        "root_id": request.root_id,
        "parent_id": request.parent_id,
        "retries": 0,
        "eta": None,
        "expires": None,
    }


def announce_end(request: Request, result: str, failed: bool) -> None:
    """Announce the end of a task, unless a revoke or a cold shutdown has announced one already."""
    if request._already_revoked or request._already_cancelled:
        return
    state.task_ready(request, successful=not failed)
    if failed:
        request.send_event("task-failed", exception=result, traceback="")
    else:
        request.send_event("task-succeeded", result=result, runtime=time.time() - request.time_start)
