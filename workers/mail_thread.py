"""Hands the mail of this incarnation on, from a thread of its own: the read waits in the server."""

import logging
import threading
from collections.abc import Callable

from relay.log import event
from relay.mailbox import Mail, Mailbox
from relay.redis_client import AWAY

log = logging.getLogger(__name__)

RETRY_S = 0.25


class MailThread:
    """Owns the mailbox. `put` and `on_crash` are called on its thread, which ends with `on_crash`."""

    def __init__(
        self, mailbox: Mailbox, put: Callable[[Mail], None], on_crash: Callable[[BaseException], None]
    ) -> None:
        self._mailbox = mailbox
        self._put = put
        self._on_crash = on_crash
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mailbox", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Wait for the thread, which ends within one blocking read, and close the mailbox."""
        self._closing.set()
        self._thread.join(timeout_s)
        self._mailbox.close()

    def _run(self) -> None:
        away = False
        while not self._closing.is_set():
            try:
                for mail in self._mailbox.read():
                    self._put(mail)
                away = False
            except AWAY as error:
                if not away:
                    event(log, "mailbox_away", logging.WARNING, error=error)
                away = True
                self._closing.wait(RETRY_S)
            except Exception as error:
                return self._on_crash(error)
