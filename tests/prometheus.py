"""Debian's Prometheus, scraping what a test runs, with the rules that are deployed."""

import json
import os
import shutil
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Self

import pytest

from tests.processes import until
from tests.servers import free_port

DEPLOY = Path(__file__).parents[1] / "deploy"
RULES = [str(DEPLOY / "prometheus" / name) for name in ("alerts.yml", "vllm.yml")]
SCRAPE_S = 1


def tool(name: str) -> str:
    """`prometheus` or `promtool`; skips the test, or fails it in CI, where it is not installed."""
    found = shutil.which(name)
    if found is None and os.environ.get("CI"):
        pytest.fail(f"{name} is missing, and CI must test with it: run tests/setup.sh")
    if found is None:
        pytest.skip(f"{name} is not installed: run tests/setup.sh")
    return found


class Prometheus:
    """Scrapes a gateway, and the workers it names, each second."""

    def __init__(self, folder: Path, gateway: str) -> None:
        """`gateway`: host:port."""
        self._binary = tool("prometheus")
        self._folder = folder
        self._url = f"http://127.0.0.1:{free_port()}"
        config = {
            "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
            "rule_files": RULES,
            "scrape_configs": [
                _static("kvrelay-cluster", gateway, metrics_path="/metrics/cluster"),
                _static("kvrelay-gateway", gateway),
                {
                    "job_name": "kvrelay-workers",
                    "http_sd_configs": [
                        {"url": f"http://{gateway}/metrics/targets", "refresh_interval": f"{SCRAPE_S}s"}
                    ],
                },
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))  # which is YAML as well

    def __enter__(self) -> Self:
        command = [
            self._binary,
            f"--config.file={self._folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address={self._url.removeprefix('http://')}",
        ]
        with (self._folder / "prometheus.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        until(self._is_ready, "Prometheus is ready", 30.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series now: `metric` is its labels, `value` time and value. Raises HTTPError."""
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def get(self, what: str, **arguments: str) -> Any:
        url = f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(url, timeout=10) as response:
            return json.load(response)["data"]

    def wait_for(self, expression: str, deadline_s: float = 30.0) -> None:
        """Until it has a value that is neither 0 nor NaN."""
        until(
            lambda: any(float(series["value"][1]) > 0 for series in self.query(expression)),
            f"{expression} > 0",
            deadline_s,
        )

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, (self._folder / "prometheus.log").read_text()
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=2) as response:
                return bool(response.status == 200)
        except OSError:
            return False


def _static(job: str, target: str, **more: str) -> dict[str, Any]:
    return {"job_name": job, "static_configs": [{"targets": [target]}], **more}
