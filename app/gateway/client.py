"""The other end of the connection."""

import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

_GONE = select.EPOLLRDHUP | select.EPOLLONESHOT  # once is enough; EPOLLHUP and EPOLLERR come by themselves


class ClientGone(Exception):
    """The client closed the connection before its reply was complete."""


class _Waiter(NamedTuple):
    tell: Callable[[], None]


class Departures:
    """Tells who waits that its client has closed the connection. Any thread may watch.

    WSGI notices only when it writes, which is never while a reply that is not streamed is being made. One
    thread sleeps on the connections of all, so that waiting costs nothing.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._waiters: dict[int, _Waiter] = {}  # by the number of their socket
        self._end = os.eventfd(0)
        self._epoll.register(self._end, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="departures", daemon=True)
        self._thread.start()

    @contextmanager
    def watching(self, environ: dict[str, Any], tell: Callable[[], None]) -> Iterator[None]:
        """Within, `tell` is called from another thread, once, when the client of this WSGI request leaves."""
        connection = environ.get("gunicorn.socket") or environ.get("werkzeug.socket")
        if type(connection) is not socket.socket:
            yield  # TLS ends here: what comes says nothing about the stream inside
            return
        number, waiter = connection.fileno(), _Waiter(tell)
        self._add(number, waiter)
        try:
            yield
        finally:
            self._remove(number, waiter)

    def close(self) -> None:
        """End the thread."""
        os.eventfd_write(self._end, 1)
        self._thread.join()
        self._epoll.close()
        os.close(self._end)

    def _run(self) -> None:
        while True:
            for number, _ in self._epoll.poll():
                if number == self._end:
                    return
                if waiter := self._waiters.get(number):
                    waiter.tell()

    def _add(self, number: int, waiter: _Waiter) -> None:
        self._waiters[number] = waiter
        try:
            self._epoll.register(number, _GONE)
        except FileExistsError:
            self._epoll.modify(number, _GONE)
        except (OSError, ValueError):
            waiter.tell()  # closed already

    def _remove(self, number: int, waiter: _Waiter) -> None:
        # The number may be that of another connection by now, if this one was closed before.
        if self._waiters.get(number) is not waiter:
            return
        del self._waiters[number]
        with suppress(OSError, ValueError):
            self._epoll.unregister(number)
