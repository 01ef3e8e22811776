"""Workers are asked to end, and others come, while requests are open."""

import os

from tests.chaos.cluster import START_S, Cluster, WorkerProcess
from tests.chaos.load import ANSWERED_S, Prompt, submit
from tests.chaos.watch import Text, Watch, compare, leaks
from tests.integration.until import until


def of_role(cluster: Cluster, role: str) -> WorkerProcess:
    return next(worker for worker in cluster.workers if worker.role == role)


def exit_status(worker: WorkerProcess) -> int:
    assert worker.process is not None
    return worker.process.wait(timeout=START_S)


def test_every_worker_is_replaced_without_an_attempt(
    cluster: Cluster, load: list[Prompt], expected: list[Text]
) -> None:
    """One worker of each role at a time leaves under load, and two of each role come."""
    for _ in range(2):
        ids = submit(cluster, load)
        watch = Watch(cluster, ids)
        until(lambda watch=watch: watch.emitted() > 0, "tokens flow", ANSWERED_S)  # type: ignore[misc]
        leaving = [of_role(cluster, role) for role in ("prefill", "decode")]
        for worker in leaving:
            cluster.remove(worker)
        assert [exit_status(worker) for worker in leaving] == [os.EX_OK, os.EX_OK]
        for worker in leaving:
            cluster.add(worker.role)
        ended = watch.all_ended(ANSWERED_S)

        assert not watch.problems
        assert not compare([ended[request_id] for request_id in ids], expected)
        records = [cluster.rooms.record(request_id) for request_id in ids]
        assert [record.attempts for record in records if record] == [1] * len(ids)
        cluster.ready()
        assert not leaks(cluster)
