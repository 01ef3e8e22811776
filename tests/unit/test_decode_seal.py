"""A decode leg runs on what its seal says and on nothing else."""

import pytest

from relay.request import Why
from tests.decode_rig import Worker
from workers.engine.messages import (
    Prebuilt,
)


@pytest.mark.parametrize(
    "wrong",
    [
        {"room": 1},
        {"attempt": 2},
        {"nonce": 5},
        {"position": 1},
        {"tokens": 19},
        {"pages": 1},
    ],
)
def test_a_seal_that_differs_is_never_text(wrong: dict[str, int]) -> None:
    worker = Worker()
    leg, task = worker.reach("published")
    worker.write(leg, **wrong)
    worker.ready(leg)
    worker.flush()
    assert worker.server.args("release") == (leg.hold, Why.ERROR)
    assert worker.output.got == []
    assert task.ends == ["failed: error"]
    worker.assert_gone(leg, quarantined=True)


def test_a_seal_from_before_another_decode_worker_died_is_text() -> None:
    worker = Worker()
    leg, _ = worker.reach("published", attempt=2)
    worker.write(leg, attempt=1)
    worker.ready(leg)
    assert isinstance(worker.desk.told[-1], Prebuilt)


def test_an_unwritten_row_is_never_text() -> None:
    worker = Worker()
    leg, _ = worker.reach("published")
    worker.ready(leg)
    worker.flush()
    assert worker.server.args("release") == (leg.hold, Why.ERROR)
    worker.assert_gone(leg, quarantined=True)


def test_pages_whose_digest_differs_are_never_text() -> None:
    worker = Worker()
    leg, _ = worker.reach("published")
    worker.write(leg)
    worker.receiver(leg).digest_matches = False
    worker.ready(leg)
    worker.flush()
    assert worker.server.args("release") == (leg.hold, Why.ERROR)
    worker.assert_gone(leg, quarantined=True)
