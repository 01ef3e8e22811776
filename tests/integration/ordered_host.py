"""An EngineHost that does what the files in a folder say, so that a test decides how each task ends.

It runs inside a real Celery worker: CELERY_CUSTOM_WORKER_POOL=tests.integration.ordered_host:OrderedPool.
The folder is ORDERS. A file `<request>.ok` or `<request>.failed` ends that task, and `<request>.<other>.fork`
begins another beside it; what the pool asks of the host is appended to `calls`. The rest of the behaviour is
in ORDERS_CAPACITY and ORDERS_GRACE_S.
"""

import os
import threading
import time
from pathlib import Path
from typing import Any

from workers.doorbell import Doorbell, TaskHandle
from workers.pool import EngineHost, EnginePool

POLL_S = 0.01


class OrderedHost:
    def __init__(self) -> None:
        self.folder = Path(os.environ["ORDERS"])
        self.slots = int(os.environ.get("ORDERS_CAPACITY", "8"))
        self.grace_s = float(os.environ.get("ORDERS_GRACE_S", "60"))
        self.running: dict[str, TaskHandle] = {}
        self.drain_ends: float | None = None
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.obey, name="ordered-host")

    def note(self, *words: object) -> None:
        with (self.folder / "calls").open("a") as calls:
            calls.write(" ".join(map(str, words)) + "\n")

    def obey(self) -> None:
        while not self.stopping.wait(POLL_S):
            for order in [*self.folder.glob("*.ok"), *self.folder.glob("*.failed")]:
                with self.lock:
                    task = self.running.pop(order.stem, None)
                if task is None:
                    continue
                order.unlink()
                if order.suffix == ".ok":
                    task.succeed(f"{order.stem} done")
                else:
                    task.fail(f"{order.stem} went wrong")
            for order in self.folder.glob("*.fork"):
                leader, fork, _ = order.name.split(".")
                with self.lock:
                    self.running[fork] = self.running[leader].fork(fork)
                order.unlink()
            if self.drain_ends is not None and time.monotonic() > self.drain_ends:
                self.hand_back()

    def start(self, name: str) -> None:
        if (self.folder / "unusable").exists():
            raise ValueError("the model is unusable: set MODEL to another one")
        self.note("start", name)
        self.thread.start()

    def ring(self, bell: Doorbell) -> None:
        if bell.request_id == "req_boom":
            raise RuntimeError("the host is broken")
        with self.lock:
            self.running[bell.request_id] = bell.task
        self.note("ring", bell.request_id, bell.leg)

    def abort(self, task: TaskHandle) -> None:
        with self.lock:
            (request_id,) = [name for name, running in self.running.items() if running is task]
            del self.running[request_id]
        self.note("abort", request_id)
        task.succeed("cancelled")

    def capacity(self) -> int:
        return max(self.slots, len(self.running))

    def stats(self) -> dict[str, Any]:
        return {"free_pages": 7, "running": len(self.running)}

    def flush_cache(self) -> int:
        return 0

    def drain(self) -> None:
        if self.drain_ends is None:
            self.note("drain")
            self.drain_ends = time.monotonic() + self.grace_s

    def hand_back(self) -> None:
        with self.lock:
            tasks, self.running = self.running, {}
        if tasks:
            self.note("hand_back", *sorted(tasks))
        for task in tasks.values():
            task.succeed("handed back")

    def idle(self) -> bool:
        return self.drain_ends is not None and not self.running

    def stop(self) -> None:
        self.stopping.set()
        self.thread.join()
        self.note("stop")


class OrderedPool(EnginePool):
    def make_host(self) -> EngineHost:
        return OrderedHost()
