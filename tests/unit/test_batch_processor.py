"""What a batch processor does again and again: one failure does not end it."""

import threading
from unittest.mock import Mock

import pytest
from redis.exceptions import ConnectionError

from app.batch.batch_processor import BatchProcessor


@pytest.mark.parametrize("error", [ConnectionError("away"), ValueError("a record that nobody can read")])
def test_what_fails_once_is_done_again(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    stopping = threading.Event()
    calls = 0

    def sweep() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise error
        stopping.set()

    BatchProcessor._repeat(Mock(_stopping=stopping), sweep, 0.0)
    assert calls == 2
    assert str(error) in caplog.text
