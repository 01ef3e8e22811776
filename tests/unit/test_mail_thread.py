"""Mail reaches the control thread in order, whatever its reader meets."""

from queue import SimpleQueue
from threading import Event
from typing import Any

import pytest
from redis.exceptions import ConnectionError

from relay.mailbox import Mail, Ready, Settled
from workers.mail_thread import MailThread

DEADLINE_S = 10.0


class Mailbox:
    """Answers each read as the test says; the next read waits for that."""

    def __init__(self) -> None:
        self.answers: SimpleQueue[list[Mail] | Exception] = SimpleQueue()
        self.closed = False

    def read(self) -> list[Mail]:
        answer = self.answers.get(timeout=DEADLINE_S)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.closed = True


def test_what_comes_while_the_server_goes_away_and_is_back_is_handed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.mail_thread.RETRY_S", 0.0)
    mailbox, handed_on = Mailbox(), SimpleQueue[Mail]()
    crashes: list[BaseException] = []
    unread: Any = mailbox
    thread = MailThread(unread, handed_on.put, crashes.append)
    sent: list[Mail] = [Ready("req_a", 1), Settled(1), Settled(2)]
    gone = ConnectionError("away")
    answers: list[list[Mail] | Exception] = [sent[:2], gone, gone, [], sent[2:]]
    for answer in answers:
        mailbox.answers.put(answer)
    thread.start()
    assert [handed_on.get(timeout=DEADLINE_S) for _ in sent] == sent
    mailbox.answers.put([])  # the read that waits
    thread.stop(DEADLINE_S)
    assert mailbox.closed
    assert crashes == []


def test_what_nobody_expects_ends_the_thread_and_is_told() -> None:
    mailbox, crashed = Mailbox(), Event()
    unread: Any = mailbox
    thread = MailThread(unread, lambda mail: None, lambda error: crashed.set())
    mailbox.answers.put(ValueError("mail that cannot be read"))
    thread.start()
    assert crashed.wait(DEADLINE_S)
    thread.stop(DEADLINE_S)
