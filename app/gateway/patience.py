"""How long a client may take to send a request: who sends it drop by drop would hold a thread for ever."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

HEAD_S = 20.0
BODY_S = 60.0
BODY_BYTES_PER_S = 1 << 16  # and the time for that many more
_LOOK_S = 1.0


class _Awaited(NamedTuple):
    """`until` is monotonic seconds."""

    connection: socket.socket
    until: float


class Patience:
    """Ends the receiving side of connections whose time is over. Any thread may ask."""

    def __init__(self, look_s: float = _LOOK_S) -> None:
        self._look_s = look_s
        self._awaited: dict[int, _Awaited] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None  # not before the first: processes fork

    @contextmanager
    def of(self, connection: socket.socket | None, seconds: float) -> Iterator[None]:
        """Within, so many seconds. None: nobody is waited for."""
        if connection is None:
            yield
            return
        awaited = _Awaited(connection, time.monotonic() + seconds)
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="patience", daemon=True)
                self._thread.start()
            self._awaited[id(awaited)] = awaited
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._awaited.pop(id(awaited), None)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._awaited))
                now = time.monotonic()
                for key, each in list(self._awaited.items()):
                    if each.until <= now:
                        del self._awaited[key]
                        with suppress(OSError):
                            each.connection.shutdown(socket.SHUT_RD)
            time.sleep(self._look_s)


PATIENCE = Patience()
