"""What Redis knows of all processes of a model. Every gateway tells the same, so one of them is asked."""

from collections import Counter as Tally
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from redis import Redis
from redis.exceptions import RedisError

from relay.batches import Batches, BatchStatus
from relay.exposition import Registry
from relay.request import Leg, State, Why
from relay.rooms import Rooms
from relay.routing import ROLES
from relay.worker_card import WorkerCard

# As `rooms.lua` counts: name there -> name here, what it is, labels.
_COUNTS = {
    "submitted": ("requests_submitted", "Requests accepted", ["kind"]),
    "ended": (
        "requests_ended",
        "Requests by how, why and when they ended",
        ["kind", "state", "reason", "stage"],
    ),
    "returned": ("legs_returned", "Legs that went back to their queue", ["leg", "reason"]),
    "beginning": (
        "prompt_beginnings",
        "Prompts claimed where others might have been, by where their beginning was",
        ["place"],
    ),
    "local": ("local_prefills", "Prompts computed where their tokens are", ["reason"]),
    "lease": ("leases", "Leases granted, renewed, expired; writes refused by their fence", ["event"]),
    "registered": ("worker_registrations", "Workers that came, or came back", ["role"]),
}


_LEGS = (Leg.PREFILL, Leg.DECODE)
# A counter that first appears when it has counted seems to have risen by nothing.
_NEVER: dict[tuple[str, ...], int] = {
    **{("lease", event): 0 for event in ("granted", "renewed", "expired", "fenced")},
    **{("returned", leg, why): 0 for leg in _LEGS for why in (*Why, "forgotten", "expired")},
    **{("beginning", place): 0 for place in ("here", "elsewhere", "new")},
    **{("local", reason): 0 for reason in ("unified", "fork")},
    **{("registered", role): 0 for role in ROLES},
    ("ended", "client", State.FAILED, "timeout", State.QUEUED): 0,
}


def cluster_registry(rooms: Rooms, batches: Batches, probe: Redis, model: str) -> Registry:
    registry = Registry(model_name=model)
    registry.register(_Cluster(rooms, batches, probe))
    return registry


class _Cluster(Collector):
    """Read when scraped; only that Redis is away, while it is."""

    def __init__(self, rooms: Rooms, batches: Batches, probe: Redis) -> None:
        self._rooms = rooms
        self._batches = batches
        self._probe = probe

    def collect(self) -> Iterator[Metric]:
        try:
            found = [
                *self._redis(),
                *self._queues(),
                *self._workers(),
                *self._counts(),
                *self._open_batches(),
            ]
        except RedisError:
            found = []
        yield GaugeMetricFamily("kvrelay_redis_up", "1 while Redis answers", value=bool(found))
        yield from found

    def _redis(self) -> Iterator[Metric]:
        memory: Any = self._probe.info("memory")
        yield GaugeMetricFamily("kvrelay_redis_memory_bytes", "Used by Redis", value=memory["used_memory"])
        yield GaugeMetricFamily(
            "kvrelay_redis_max_memory_bytes", "What it may use; 0: no limit", value=memory["maxmemory"]
        )

    def _queues(self) -> Iterator[Metric]:
        labels = ["leg", "kind"]
        length = GaugeMetricFamily("kvrelay_queue_length", "Legs that wait for a worker", labels=labels)
        oldest = GaugeMetricFamily("kvrelay_queue_oldest_seconds", "How long the first has", labels=labels)
        for queue in self._rooms.backlog():
            of_queue = [queue.leg, "batch" if queue.batch else "client"]
            length.add_metric(of_queue, queue.legs)
            oldest.add_metric(of_queue, queue.oldest_ms / 1e3)
        yield from (length, oldest)

    def _workers(self) -> Iterator[Metric]:
        workers = self._rooms.workers()
        alive = GaugeMetricFamily("kvrelay_workers", "Living workers", labels=["role"])
        tally = Tally(worker.role for worker in workers)
        for role in ROLES:
            alive.add_metric([role], tally[role])
        yield alive
        yield from _of_cards(workers)

    def _counts(self) -> Iterator[Metric]:
        counts = self._rooms.counts()
        for key, (name, about, labels) in _COUNTS.items():
            family = CounterMetricFamily(f"kvrelay_{name}", about, labels=labels)
            for (what, *values), times in sorted((_NEVER | counts).items()):
                if what == key:
                    family.add_metric(values, times)
            yield family

    def _open_batches(self) -> Iterator[Metric]:
        found = self._batches.open()
        batches = GaugeMetricFamily("kvrelay_open_batches", "Batches that have not ended", labels=["status"])
        tally = Tally(batch.status for batch in found)
        for status in BatchStatus:
            if not status.terminal:
                batches.add_metric([status], tally[status])
        yield batches
        left = sum((batch.total or 0) - batch.completed - batch.failed for batch in found)
        yield GaugeMetricFamily("kvrelay_batch_lines_left", "Lines of batches without a result", value=left)


def _of_cards(workers: list[WorkerCard]) -> Iterator[Metric]:
    """As each worker's last renewal told, for whoever cannot reach the workers."""
    labels = ["worker", "role", "state"]
    legs = GaugeMetricFamily("kvrelay_worker_legs", "Legs of a worker, and room for more", labels=labels)
    pages = GaugeMetricFamily("kvrelay_worker_pages", "KV pages of a worker by state", labels=labels)
    for worker in workers:
        of_worker, load = [worker.name, worker.role], worker.load
        for state, value in (("running", load.running), ("waiting", load.waiting), ("free", load.slots)):
            legs.add_metric([*of_worker, state], value)
        for state, value in (
            ("free", load.free_pages),
            ("cached", load.cached_pages),
            ("held", load.held_pages),
            ("quarantined", load.quarantined_pages),
        ):
            pages.add_metric([*of_worker, state], value)
    yield from (legs, pages)
