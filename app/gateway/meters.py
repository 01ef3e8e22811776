"""What is measured: this gateway's counters, and the living workers as their cards tell."""

from collections import Counter as Tally
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from redis.exceptions import RedisError

from app.gateway.follow import Follower
from relay.batches import Batches
from relay.request import Leg
from relay.rooms import Rooms

_FIRST_TOKEN_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_BETWEEN_TOKENS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
_WHOLE_S = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800)


class Meters:
    """What one gateway counts. Latencies are those of requests that it streamed or waited for."""

    def __init__(self, rooms: Rooms, batches: Batches, follower: Follower) -> None:
        self.registry = CollectorRegistry()
        self.http_requests = Counter(
            "kvrelay_http_requests", "HTTP requests", ["route", "status"], registry=self.registry
        )
        self.submitted = Counter(
            "kvrelay_requests",
            "Requests accepted, or replayed by their key",
            ["kind", "outcome"],
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "kvrelay_prompt_tokens", "Prompt tokens accepted", registry=self.registry
        )
        self.streamed_tokens = Counter("kvrelay_streamed_tokens", "Tokens sent", registry=self.registry)
        self.disconnects = Counter(
            "kvrelay_client_disconnects", "Clients that left before the end", registry=self.registry
        )
        self.first_token_s = Histogram(
            "kvrelay_time_to_first_token_seconds",
            "From arrival to first token",
            ["kind"],
            buckets=_FIRST_TOKEN_S,
            registry=self.registry,
        )
        self.between_tokens_s = Histogram(
            "kvrelay_inter_token_latency_seconds",
            "Between two tokens",
            ["kind"],
            buckets=_BETWEEN_TOKENS_S,
            registry=self.registry,
        )
        self.whole_s = Histogram(
            "kvrelay_e2e_request_latency_seconds",
            "From arrival to end",
            ["kind", "state"],
            buckets=_WHOLE_S,
            registry=self.registry,
        )
        watched = Gauge("kvrelay_followed_streams", "Streams and polls that wait", registry=self.registry)
        watched.set_function(follower.waiting)
        self.registry.register(_Workers(rooms))
        self.registry.register(_OpenBatches(batches))


class _OpenBatches(Collector):
    """Gauges of what waits overnight, read when scraped; none while Redis is away."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def collect(self) -> Iterator[Metric]:
        try:
            found = self._batches.open()
        except RedisError:
            return
        open_batches = GaugeMetricFamily(
            "kvrelay_open_batches", "Batches that have not ended", labels=["status"]
        )
        for status, count in Tally(batch.status for batch in found).items():
            open_batches.add_metric([status], count)
        yield open_batches
        left = sum((batch.total or 0) - batch.completed - batch.failed for batch in found)
        yield GaugeMetricFamily("kvrelay_batch_lines_left", "Lines of batches without a result", value=left)


class _Workers(Collector):
    """Gauges from the cards in Redis, read when scraped."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("kvrelay_redis_up", "1 while Redis answers")
        try:
            workers = self._rooms.workers()
            waiting_legs = {leg: self._rooms.waiting(leg).legs for leg in (Leg.PREFILL, Leg.DECODE)}
        except RedisError:
            up.add_metric([], 0)
            yield up
            return
        up.add_metric([], 1)
        yield up

        queues = GaugeMetricFamily("kvrelay_queue_length", "Legs that wait for a worker", labels=["leg"])
        for leg, length in waiting_legs.items():
            queues.add_metric([leg], length)
        yield queues

        alive = GaugeMetricFamily("kvrelay_workers", "Living workers", labels=["role"])
        tally = Tally(worker.role for worker in workers)
        for role in ("prefill", "decode", "unified"):
            alive.add_metric([role], tally[role])
        yield alive

        of_worker = ["worker", "role"]
        running = GaugeMetricFamily("kvrelay_num_requests_running", "Legs in the batch", labels=of_worker)
        waiting = GaugeMetricFamily("kvrelay_num_requests_waiting", "Legs not running yet", labels=of_worker)
        slots = GaugeMetricFamily("kvrelay_free_slots", "Legs that could be claimed", labels=of_worker)
        pages = GaugeMetricFamily("kvrelay_kv_pages", "KV pages by state", labels=[*of_worker, "state"])
        for worker in workers:
            labels, load = [worker.name, worker.role], worker.load
            running.add_metric(labels, load.running)
            waiting.add_metric(labels, load.waiting)
            slots.add_metric(labels, load.slots)
            pages.add_metric([*labels, "free"], load.free_pages)
            pages.add_metric([*labels, "cached"], load.cached_pages)
            pages.add_metric([*labels, "held"], load.held_pages)
            pages.add_metric([*labels, "quarantined"], load.quarantined_pages)
        yield from (running, waiting, slots, pages)
