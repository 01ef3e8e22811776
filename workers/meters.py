"""What one worker measures, for Prometheus. Names are vLLM's behind `kvrelay_` where it has one."""

import time
from collections.abc import Callable, Collection, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from relay.answers import Milestone
from relay.settings import Settings
from relay.worker_card import Load
from workers.doorbell import Doorbell
from workers.engine.stats import EngineStats
from workers.quarantine import Unproven
from workers.transfer.base import Handshakes, Sent

_HOP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_FIRST_TOKEN_S = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 40, 80, 160)
_TOKEN_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 5)
_STAGE_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 40, 60, 120, 300, 600, 1800)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_BYTES = tuple(2.0**power for power in range(11, 35, 2))
_VERDICTS = ("met", "missed")
_PIECES = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000)


class Meters:
    """What threads count as it happens, each series by one thread. Latencies and sizes are those of requests
    that a client waits for, by the server's clock; lines of batches are only counted.

    What a role never does is not shown: a prefill worker emits nothing, the others send no KV."""

    def __init__(self, settings: Settings, registry: CollectorRegistry) -> None:
        self._slo_ttft_ms = settings.slo_ttft_ms
        self._slo_tpot_ms = settings.slo_tpot_ms

        shown: CollectorRegistry | None = registry

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"kvrelay_{name}", about, labels, registry=shown)

        def histogram(name: str, about: str, buckets: Collection[float]) -> Histogram:
            return Histogram(f"kvrelay_{name}", about, buckets=tuple(buckets), registry=shown)

        self._doorbell_s = histogram(
            "doorbell_seconds", "From sending a doorbell to its arrival in the pool", _HOP_S
        )
        shown = registry if settings.role != "prefill" else None
        self._tokens = counter("generation_tokens", "Tokens that went to Redis, where clients read them")
        self._token_s = histogram("inter_token_latency_seconds", "Between two tokens of a request", _TOKEN_S)
        self._first_token_s = histogram(
            "time_to_first_token_seconds", "From acceptance to the first token", _FIRST_TOKEN_S
        )
        self._ended = counter("request_success", "Requests that finished here", "finished_reason")
        self._whole_s = histogram("e2e_request_latency_seconds", "From acceptance to the end", _STAGE_S)
        self._queue_s = histogram(
            "request_queue_time_seconds", "From acceptance to the claim of the prefill leg", _STAGE_S
        )
        self._inference_s = histogram(
            "request_inference_time_seconds", "From the claim of the prefill leg to the end", _STAGE_S
        )
        self._prefill_s = histogram(
            "request_prefill_time_seconds", "From the first chunk's begin to the last one's end", _STAGE_S
        )
        self._decode_s = histogram("request_decode_time_seconds", "From the first token to the end", _STAGE_S)
        self._per_token_s = histogram(
            "request_time_per_output_token_seconds", "Mean of a request, after its first token", _TOKEN_S
        )
        self._prompt_tokens = histogram("request_prompt_tokens", "Of a prompt", _TOKENS)
        self._answer_tokens = histogram("request_generation_tokens", "Of an answer", _TOKENS)
        self._slo = counter(
            "slo_requests", "Finished, by whether SLO_TTFT_MS and SLO_TPOT_MS were met", "ttft", "tpot"
        )
        for ttft in _VERDICTS:
            for tpot in _VERDICTS:
                self._slo.labels(ttft, tpot)  # shown from the start: 0 of them
        shown = registry if settings.role == "decode" else None
        self._quarantine_s = histogram(
            "quarantine_seconds",
            "From the end of a leg whose pages a peer might write to the proof",
            _STAGE_S,
        )
        shown = registry if settings.role == "prefill" else None
        self._flying_s = histogram(
            "nixl_xfer_time_seconds", "Of one prompt's KV: while a write of it was in flight", _HOP_S
        )
        self._posting_s = histogram(
            "nixl_post_time_seconds", "Of one prompt's KV: the calls that start its writes", _HOP_S
        )
        self._exposed_s = histogram(
            "transfer_exposed_seconds", "From the end of prefill compute to the seal's arrival", _HOP_S
        )
        self._bytes = histogram("nixl_bytes_transferred", "Of one prompt's KV", _BYTES)
        self._descriptors = histogram("nixl_num_descriptors", "Of one prompt's KV", _PIECES)
        self._failed_sends = counter("nixl_num_failed_transfers", "Rooms whose KV could not be sent")

    def rang(self, bell: Doorbell) -> None:
        if bell.rung_at:
            self._doorbell_s.observe(max(0.0, time.time() - bell.rung_at))

    def emitted(self, tokens: int, since_s: float | None) -> None:
        """So many tokens of a leg, and the time since those before, if there were any here."""
        self._tokens.inc(tokens)
        if since_s is None:
            return
        for _ in range(tokens):
            self._token_s.observe(since_s / tokens)

    def finished(self, reason: str) -> None:
        self._ended.labels(reason).inc()

    def reached(self, m: Milestone) -> None:
        if m.first:
            self._first_token_s.observe(_seconds(m.submitted, m.first_token))
        if not m.ended:
            return
        self._whole_s.observe(_seconds(m.submitted, m.ended))
        self._queue_s.observe(_seconds(m.submitted, m.claimed))
        self._inference_s.observe(_seconds(m.claimed, m.ended))
        self._prompt_tokens.observe(m.prompt_tokens)
        self._answer_tokens.observe(m.completion_tokens)
        if m.prefill_end:
            self._prefill_s.observe(_seconds(m.prefill_start, m.prefill_end))
        if not m.first_token:  # it was asked for none
            return
        self._decode_s.observe(_seconds(m.first_token, m.ended))
        per_token_s = _seconds(m.first_token, m.ended) / max(1, m.completion_tokens - 1)
        if m.completion_tokens > 1:
            self._per_token_s.observe(per_token_s)
        first_good = _seconds(m.submitted, m.first_token) * 1e3 <= self._slo_ttft_ms
        self._slo.labels(_met(first_good), _met(per_token_s * 1e3 <= self._slo_tpot_ms)).inc()

    def proven(self, waited_s: float) -> None:
        self._quarantine_s.observe(waited_s)

    def sent(self, sent: Sent) -> None:
        self._flying_s.observe(sent.flying_us / 1e6)
        self._posting_s.observe(sent.posting_us / 1e6)
        self._exposed_s.observe(max(0, sent.exposed_us) / 1e6)
        self._bytes.observe(sent.bytes)
        self._descriptors.observe(sent.descriptors)

    def send_failed(self) -> None:
        self._failed_sends.inc()


class WorkerState(Collector):
    """What the threads publish as a whole anyway, read when scraped."""

    def __init__(
        self,
        load: Callable[[], Load],
        stats: Callable[[], EngineStats],
        unproven: Callable[[], Collection[Unproven]],
        handshakes: Callable[[], Handshakes],
        peer_restarts: Callable[[], int],
        page_size: int,
        total_pages: int,
    ) -> None:
        self._load = load
        self._stats = stats
        self._unproven = unproven
        self._handshakes = handshakes
        self._peer_restarts = peer_restarts
        self._page_size = page_size
        self._total_pages = total_pages

    def collect(self) -> Iterator[Metric]:
        yield from self._of_load(self._load())
        yield from self._of_engine(self._stats())
        yield from self._of_peers()

    def _of_load(self, load: Load) -> Iterator[Metric]:
        yield _gauge("num_requests_running", "Legs that compute", load.running)
        yield _gauge("num_requests_waiting", "Legs and credits that wait in this worker", load.waiting)
        yield _gauge("free_slots", "Legs that it could claim now", load.slots)
        used = load.held_pages + load.quarantined_pages
        yield _gauge("kv_cache_usage_perc", "Share of the KV pool in use, 0 to 1", used / self._total_pages)
        pages = GaugeMetricFamily("kvrelay_kv_pages", "KV pages by state", labels=["state"])
        pages.add_metric(["free"], load.free_pages)
        pages.add_metric(["cached"], load.cached_pages)
        pages.add_metric(["held"], load.held_pages)
        pages.add_metric(["quarantined"], load.quarantined_pages)
        yield pages
        yield _gauge("pinned_pages", "Held pages that a peer writes, or a send reads", load.pinned_pages)
        labels = ["block_size", "num_gpu_blocks"]
        config = GaugeMetricFamily("kvrelay_cache_config_info", "The KV pool, in pages", labels=labels)
        config.add_metric([str(self._page_size), str(self._total_pages)], 1)
        yield config

    def _of_engine(self, stats: EngineStats) -> Iterator[Metric]:
        prompt_tokens = stats.prefill_tokens + stats.cached_tokens
        yield _counter("prompt_tokens", "Of prompts that were prefilled here", prompt_tokens)
        yield _counter("prompt_tokens_cached", "Of these, found in the prefix cache", stats.cached_tokens)
        yield _counter("prefix_cache_queries", "Tokens looked up in the prefix cache", prompt_tokens)
        yield _counter("prefix_cache_hits", "Tokens found in the prefix cache", stats.cached_tokens)
        yield _counter("reserved_tokens", "Of prompts whose KV came from a peer", stats.reserved_tokens)
        yield _counter("spared_tokens", "Of these, found here and not sent", stats.spared_tokens)
        yield _counter("num_preemptions", "Running legs that lost their pages", stats.retractions)
        yield _counter("engine_steps", "Steps of the engine", stats.steps)
        parts = CounterMetricFamily("kvrelay_engine_seconds", "Where steps spend time", labels=["part"])
        told = stats.plan_s + stats.forward_s + stats.sample_s
        parts.add_metric(["plan"], stats.plan_s)
        parts.add_metric(["forward"], stats.forward_s)
        parts.add_metric(["sample"], stats.sample_s)
        parts.add_metric(["other"], max(0.0, stats.step_s - told))
        yield parts

    def _of_peers(self) -> Iterator[Metric]:
        waits = self._unproven()
        yield _gauge("unproven_pages", "Pages that a peer might still touch", sum(w.pages for w in waits))
        oldest = min((wait.since for wait in waits), default=None)
        yield _gauge(
            "unproven_oldest_seconds",
            "For how long the first of them has waited",
            0.0 if oldest is None else time.monotonic() - oldest,
        )
        ok, failed = self._handshakes()
        handshakes = CounterMetricFamily("kvrelay_handshakes", "Connections to peers", labels=["outcome"])
        handshakes.add_metric(["ok"], ok)
        handshakes.add_metric(["failed"], failed)
        yield handshakes
        yield _counter("peer_restarts", "Peers that came back as another process", self._peer_restarts())


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvrelay_{name}", about, value=value)


def _counter(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(f"kvrelay_{name}", about, value=value)


def _seconds(begin_ms: float, end_ms: float) -> float:
    return max(0.0, end_ms - begin_ms) / 1e3


def _met(good: bool) -> str:
    return "met" if good else "missed"
