"""What deploy/ gives to Prometheus and Grafana, tried on a Prometheus that scrapes a relay under load."""

import json
import math
import re
import secrets
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.gateway_rig import GatewayProcess
from tests.processes import until
from tests.prometheus import DEPLOY, RULES, Prometheus, tool
from tests.relay_rig import Relay, tiny_model
from tests.servers import RedisServer, free_port

DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
WINDOW = "10s"  # for Grafana's $__rate_interval
PROMPT = list(range(3, 53))
LONG_PROMPT = [3 + n % 50 for n in range(1500)]
TOKENS = 24
OPERATIONS = DEPLOY.parent / "docs" / "operations.md"


def panels(dashboard: Path) -> list[dict[str, Any]]:
    return [panel for panel in json.loads(dashboard.read_text())["panels"] if panel["type"] != "row"]


EXPRESSIONS = [
    pytest.param(target["expr"], id=f"{dashboard.stem}: {panel['title']} {target['refId']}")
    for dashboard in DASHBOARDS
    for panel in panels(dashboard)
    for target in panel["targets"]
]


@pytest.fixture(scope="module")
def relay(valkey: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    tool("prometheus")
    folder = tmp_path_factory.mktemp("monitored")
    model = tiny_model(folder / "model", max_position_embeddings=2048)
    relay = Relay(valkey, folder, "monitored", MODEL=str(model))
    for role in ("prefill", "decode"):
        relay.start(role, METRICS_PORT=str(free_port()))
    relay.ready()
    yield relay
    relay.close()


@pytest.fixture(scope="module")
def gateway(
    valkey: RedisServer, relay: Relay, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("gateway")
    with GatewayProcess(valkey.url, relay.model, folder / "log", MODEL=relay.env["MODEL"]) as process:
        yield process


def leave_in_mid_transfer(gateway: GatewayProcess) -> None:
    """So that pages of the decode worker wait for the proof that nobody writes to them."""
    body = {"prompt": LONG_PROMPT, "max_tokens": TOKENS, "cache_salt": secrets.token_hex(8)}
    path = f"/v1/requests/{gateway.call('POST', '/v1/requests', body).body['id']}"
    until(lambda: gateway.call("GET", path).body["ledger"]["bootstrap"] is not None, "pages are published")
    gateway.call("DELETE", path)


@pytest.fixture(scope="module")
def prometheus(gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It has seen requests of each outcome, and more come while the tests ask."""
    stop = threading.Event()

    def load() -> None:
        while not stop.wait(0.05):
            body = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True}
            answer = gateway.call("POST", "/v1/completions", body)
            assert answer.status == 200, answer
            submitted = gateway.call("POST", "/v1/requests", body)
            assert submitted.status == 202, submitted
            gateway.call("DELETE", f"/v1/requests/{submitted.body['id']}")
            leave_in_mid_transfer(gateway)

    thread = threading.Thread(target=load)
    with Prometheus(tmp_path_factory.mktemp("prometheus"), f"127.0.0.1:{gateway.port}") as running:
        thread.start()
        running.wait_for(f"sum(rate(kvrelay_generation_tokens_total[{WINDOW}]))")
        running.wait_for(f'sum(rate(kvrelay_requests_ended_total{{state="cancelled"}}[{WINDOW}]))')
        running.wait_for(f"sum(rate(kvrelay_quarantine_seconds_count[{WINDOW}]))")
        yield running
        stop.set()
        thread.join()


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_panel_has_data(prometheus: Prometheus, expression: str) -> None:
    asked = expression.replace("$model_name", "monitored").replace("$__rate_interval", WINDOW)
    until(
        lambda: any(math.isfinite(float(series["value"][1])) for series in prometheus.query(asked)),
        f"{asked} has a value",
    )


def test_every_metric_is_plotted_or_explained(prometheus: Prometheus) -> None:
    """What the processes export is in a dashboard, a rule, or the tables of docs/operations.md."""
    exported = {
        re.sub(r"_(bucket|count|sum)$", "", name)
        for name in prometheus.get("label/__name__/values")
        if name.startswith("kvrelay_")
    }
    assert len(exported) > 60
    plotted = "".join(path.read_text() for path in (*DASHBOARDS, DEPLOY / "prometheus" / "alerts.yml"))
    explained = re.findall(r"`(?:kvrelay_)?([a-z_]+)(?:\{[a-z_, ]+\})?`", OPERATIONS.read_text())
    unknown = exported - {f"kvrelay_{name}" for name in explained}
    assert [name for name in unknown if name not in plotted] == []


def test_every_series_that_a_rule_reads_is_there(prometheus: Prometheus) -> None:
    """A rule whose series is missing is healthy, and silent for ever."""
    read = {
        selector
        for rule in rules(prometheus)
        for selector in re.findall(r"\b(?:kvrelay[a-z_:0-9]+|up)(?:\{[^}]*\})?", rule["query"])
        if not rule["query"].startswith("kvrelay:")
    }
    assert len(read) > 20
    until(lambda: all(prometheus.query(selector) for selector in read), "each series is there", 30.0)


def rules(prometheus: Prometheus, group: str = "") -> list[dict[str, Any]]:
    groups = prometheus.get("rules")["groups"]
    return [rule for each in groups if each["name"].startswith(group) for rule in each["rules"]]


def test_every_rule_is_evaluated_and_nothing_fires(prometheus: Prometheus) -> None:
    until(lambda: {rule["health"] for rule in rules(prometheus)} == {"ok"}, "all rules are evaluated", 30.0)
    firing = [rule["name"] for rule in rules(prometheus) if rule.get("state") == "firing"]
    assert firing == []
    prometheus.wait_for("kvrelay:missed:ratio_rate5m >= bool 0")


def test_vllms_names_are_there(prometheus: Prometheus) -> None:
    def missing() -> list[str]:
        names = [rule["name"] for rule in rules(prometheus, "vllm")]
        assert len(names) > 50
        return [name for name in names if not prometheus.query(name)]

    until(lambda: not missing(), "each of vLLM's names has a value", 30.0)
    prometheus.wait_for("histogram_quantile(0.9, sum by (le) (vllm:time_to_first_token_seconds_bucket))")


def test_what_is_counted_adds_up(prometheus: Prometheus) -> None:
    """Of the requests that finished, each was counted in Redis and in one worker, with its tokens."""

    def total(expression: str) -> float:
        (series,) = prometheus.query(f"sum({expression})")
        return float(series["value"][1])

    for found, expected in (
        ("kvrelay_request_success_total", 'kvrelay_requests_ended_total{state="finished"}'),
        ("kvrelay_e2e_request_latency_seconds_count", "kvrelay_request_success_total"),
        ("kvrelay_slo_requests_total", "kvrelay_request_success_total"),
        ("kvrelay_request_generation_tokens_sum", f"{TOKENS} * kvrelay_request_success_total"),
        ("kvrelay_request_prompt_tokens_sum", f"{len(PROMPT)} * kvrelay_request_success_total"),
        ("kvrelay_nixl_bytes_transferred_count", "kvrelay_nixl_num_descriptors_count"),
    ):
        # They are scraped at different moments, while requests go on: apart by a few at most.
        assert total(found) == pytest.approx(total(expected), rel=0.5), found
    assert total("kvrelay_handshakes_total") == total('kvrelay_handshakes_total{outcome="ok"}') == 1


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_hold_nothing_that_grafana_does_not_know(path: Path) -> None:
    """Grafana's own types keep every field of them."""
    register_default_plugins()
    written = json.loads(path.read_text())
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(written)))
    assert _lost(written, read) == []
    assert len({panel["id"] for panel in written["panels"]}) == len(written["panels"])


def _lost(written: Any, read: Any, place: str = "") -> list[str]:
    if isinstance(written, dict) and isinstance(read, dict):
        return [lost for name in written for lost in _lost(written[name], read.get(name), f"{place}.{name}")]
    if isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        pairs = enumerate(zip(written, read))
        return [lost for i, (a, b) in pairs for lost in _lost(a, b, f"{place}[{i}]")]
    return [] if written == read or written is None else [f"{place}: {written} became {read}"]


def test_rules_and_configuration_are_valid() -> None:
    promtool, folder = tool("promtool"), DEPLOY / "prometheus"
    for arguments in (
        ["check", "config", str(folder / "prometheus.yml")],
        ["check", "rules", *RULES],
        ["test", "rules", str(folder / "tests" / "alerts_test.yml")],
    ):
        done = subprocess.run([promtool, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
