"""What a worker tells Prometheus of what happened in it."""

import socket
import time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.samples import Sample

from relay.answers import Milestone
from relay.exposition import Registry, metrics_address, serve
from relay.request import Leg
from relay.settings import Settings, SettingsError
from relay.worker_card import Load
from tests.samples import samples, value_of
from tests.servers import free_port
from workers.doorbell import Doorbell
from workers.engine.stats import EngineStats
from workers.meters import Meters, WorkerState
from workers.quarantine import Unproven
from workers.transfer.base import Handshakes, Sent

SUBMITTED = 1e12
END = Milestone(
    first=False,
    submitted=SUBMITTED,
    claimed=SUBMITTED + 100,
    prefill_start=SUBMITTED + 150,
    prefill_end=SUBMITTED + 400,
    first_token=SUBMITTED + 500,
    ended=SUBMITTED + 1500,
    prompt_tokens=30,
    cached_tokens=16,
    completion_tokens=11,
)


def told(registry: CollectorRegistry) -> list[Sample]:
    return samples(generate_latest(registry).decode())


def meters(registry: CollectorRegistry, **settings: Any) -> Meters:
    chosen: dict[str, Any] = {"role": "decode", "slo_ttft_ms": 500, "slo_tpot_ms": 100, **settings}
    return Meters(Settings(**chosen), registry)


def test_a_request_is_measured_by_the_stamps_of_its_record() -> None:
    registry = CollectorRegistry()
    counts = meters(registry)
    counts.reached(END._replace(first=True, ended=0))
    counts.reached(END)
    found = told(registry)
    for name, seconds in (
        ("time_to_first_token_seconds", 0.5),
        ("e2e_request_latency_seconds", 1.5),
        ("request_queue_time_seconds", 0.1),
        ("request_prefill_time_seconds", 0.25),
        ("request_decode_time_seconds", 1.0),
        ("request_inference_time_seconds", 1.4),
        ("request_time_per_output_token_seconds", 0.1),
        ("request_prompt_tokens", 30),
        ("request_generation_tokens", 11),
    ):
        assert value_of(found, f"kvrelay_{name}_sum") == pytest.approx(seconds), name
        assert value_of(found, f"kvrelay_{name}_count") == 1, name


@pytest.mark.parametrize(
    ("changes", "ttft", "tpot"),
    [
        ({}, "met", "met"),
        ({"first_token": SUBMITTED + 501}, "missed", "met"),
        ({"ended": SUBMITTED + 1501}, "met", "missed"),
        ({"completion_tokens": 1, "ended": SUBMITTED + 500}, "met", "met"),
    ],
)
def test_goodput_is_what_meets_both_targets(changes: dict[str, Any], ttft: str, tpot: str) -> None:
    registry = CollectorRegistry()
    meters(registry).reached(END._replace(**changes))
    found = told(registry)
    assert value_of(found, "kvrelay_slo_requests_total", ttft=ttft, tpot=tpot) == 1
    assert value_of(found, "kvrelay_slo_requests_total") == 1


def test_a_request_without_tokens_has_no_latency_of_tokens() -> None:
    registry = CollectorRegistry()
    meters(registry).reached(END._replace(first_token=0, prefill_end=0, completion_tokens=0))
    found = told(registry)
    assert value_of(found, "kvrelay_e2e_request_latency_seconds_count") == 1
    for name in ("time_to_first_token", "request_decode_time", "request_prefill_time"):
        assert value_of(found, f"kvrelay_{name}_seconds_count") == 0
    assert value_of(found, "kvrelay_slo_requests_total") == 0


def test_tokens_that_come_together_share_their_wait() -> None:
    registry = CollectorRegistry()
    counts = meters(registry)
    counts.emitted(1, None)
    counts.emitted(4, 0.2)
    found = told(registry)
    assert value_of(found, "kvrelay_generation_tokens_total") == 5
    assert value_of(found, "kvrelay_inter_token_latency_seconds_count") == 4
    assert value_of(found, "kvrelay_inter_token_latency_seconds_sum") == pytest.approx(0.2)


def test_doorbells_of_a_clock_ahead_took_no_time_and_of_strangers_are_not_measured() -> None:
    registry = CollectorRegistry()
    counts = meters(registry)
    for rung_at in (time.time() - 5, time.time() + 60, 0.0):
        counts.rang(Doorbell("req", Leg.DECODE, None, rung_at))  # type: ignore[arg-type]
    found = told(registry)
    assert value_of(found, "kvrelay_doorbell_seconds_count") == 2
    assert value_of(found, "kvrelay_doorbell_seconds_sum") == pytest.approx(5, abs=1)


def test_a_role_shows_what_it_does() -> None:
    names = {}
    for role in ("prefill", "decode", "unified"):
        registry = CollectorRegistry()
        counts = meters(registry, role=role)
        counts.sent(Sent(1, bytes=4096, descriptors=2, exposed_us=300, flying_us=2000, posting_us=100))
        names[role] = {sample.name for sample in told(registry)}

    def of(name: str) -> set[str]:
        return {f"kvrelay_{name}_{part}" for part in ("bucket", "count", "sum")}

    assert names["decode"] - names["unified"] == of("quarantine_seconds")
    assert names["unified"] < names["decode"]
    assert names["prefill"] & names["decode"] == of("doorbell_seconds")
    assert "kvrelay_nixl_xfer_time_seconds_sum" in names["prefill"]


def test_the_state_of_a_worker_is_read_when_it_is_scraped() -> None:
    registry = Registry(model_name="m", role="decode", worker="w")
    load = Load(2, 160, 3, 1, 10, 20, 5, 5, 4)
    stats = EngineStats(steps=7, step_s=2.0, plan_s=0.25, forward_s=1.0, prefill_tokens=30, cached_tokens=10)
    waits = [Unproven(3, time.monotonic() - 9), Unproven(2, time.monotonic())]
    registry.register(
        WorkerState(
            lambda: load,
            lambda: stats,
            lambda: waits,
            lambda: Handshakes(2, 1),
            lambda: 1,
            16,
            total_pages=40,
        )
    )
    found = told(registry)
    for name, value, labels in (
        ("num_requests_running", 3, {}),
        ("kv_cache_usage_perc", 0.25, {}),
        ("kv_pages", 40, {}),
        ("kv_pages", 5, {"state": "held"}),
        ("pinned_pages", 4, {}),
        ("prompt_tokens_total", 40, {}),
        ("prefix_cache_hits_total", 10, {}),
        ("engine_seconds_total", 2.0, {}),
        ("engine_seconds_total", 0.75, {"part": "other"}),
        ("unproven_pages", 5, {}),
        ("handshakes_total", 1, {"outcome": "failed"}),
        ("peer_restarts_total", 1, {}),
        ("cache_config_info", 1, {"num_gpu_blocks": "40", "block_size": "16"}),
    ):
        assert value_of(found, f"kvrelay_{name}", **labels) == value, name
    assert value_of(found, "kvrelay_unproven_oldest_seconds") == pytest.approx(9, abs=1)
    whose = {"model_name": "m", "role": "decode", "worker": "w"}
    assert all(whose.items() <= sample.labels.items() for sample in found)


def test_where_a_worker_answers() -> None:
    assert metrics_address(Settings()) == ""
    assert metrics_address(Settings(metrics_port=9400)) == "127.0.0.1:9400"
    assert metrics_address(Settings(metrics_port=9400, host="::1")) == "[::1]:9400"
    for url in ("redis://127.0.0.1/0", "sentinel://127.0.0.1:26379,127.0.0.2/main"):
        assert metrics_address(Settings(metrics_port=9400, host="0.0.0.0", redis_url=url)) == "127.0.0.1:9400"
    unix = Settings(metrics_port=9400, host="0.0.0.0", redis_url="unix:///run/redis.sock")
    assert metrics_address(unix) == f"{socket.gethostname()}:9400"


def test_a_port_that_is_taken_is_told() -> None:
    settings = Settings(metrics_port=free_port())
    serve(Registry(), settings)
    with pytest.raises(SettingsError, match="METRICS_PORT"):
        serve(Registry(), settings)
