"""Threads that answer the lines of batches, so many at a time."""

import threading
from collections.abc import Callable
from queue import SimpleQueue


class LineThreads:
    """Any thread may call. They end with the process, whatever they wait for.

    A thread is kept for the next line: what Celery and redis-py make once per thread costs more than a line.
    """

    def __init__(self, most: int) -> None:
        self._free = threading.Semaphore(most)
        self._work: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def take(self, timeout_s: float) -> bool:
        """Wait for a thread, which is the caller's until it has done what `run` gives it."""
        return self._free.acquire(timeout=timeout_s)

    def run(self, work: Callable[[], object]) -> None:
        """In the thread that was taken. `work` raises nothing."""
        with self._lock:
            new, self._idle = self._idle == 0, max(self._idle - 1, 0)
        self._work.put(work)
        if new:
            threading.Thread(target=self._serve, daemon=True, name="line").start()

    def _serve(self) -> None:
        while True:
            self._work.get()()
            with self._lock:
                self._idle += 1
            self._free.release()
