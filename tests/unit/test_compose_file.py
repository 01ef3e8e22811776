"""docker-compose.yml: whatever is set for it reaches the processes that read it."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from relay.settings import Settings

ROOT = Path(__file__).parents[2]
FILES = ("docker-compose.yml", "docker-compose.gpu.yml")
SETTINGS = {name.upper() for name in Settings.__dataclass_fields__}
# What the image and the file themselves decide, and what only `kvrelay up` reads.
DECIDED = {"HOST", "PORT", "FLOWER_PORT", "VAR_DIR", "ROLE"}
OF_OTHERS = {
    *("FLOWER_BASIC_AUTH", "OTEL_EXPORTER_OTLP_ENDPOINT"),
    *("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"),
}
OF_UP = {"PREFILL_WORKERS", "DECODE_WORKERS", "UNIFIED_WORKERS", "BATCH_PROCESSORS", "CORES"}


def environments(name: str) -> dict[str, dict[str, Any]]:
    """By service, of those that run kvrelay."""
    services = yaml.safe_load((ROOT / name).read_text())["services"]
    return {each: told.get("environment", {}) for each, told in services.items() if each != "grafana"}


def names(environment: dict[str, Any]) -> set[str]:
    return {name if name in SETTINGS else name.removesuffix("_FILE") for name in environment}


def test_every_setting_can_be_set() -> None:
    told = set().union(*(names(each) for file in FILES for each in environments(file).values()))
    assert SETTINGS - told == DECIDED | OF_UP


@pytest.mark.parametrize("file", FILES)
def test_what_is_set_is_a_setting_and_keeps_its_name(file: str) -> None:
    for environment in environments(file).values():
        assert names(environment) <= SETTINGS | OF_OTHERS
        for name, value in environment.items():
            found = re.fullmatch(r"\$\{(\w+):-.*\}", str(value))
            if found and name in SETTINGS:
                assert found[1] == name


def test_each_worker_takes_its_gpu_and_sees_the_others() -> None:
    """Who maps another's memory must see the GPU that it is on."""
    told = environments("docker-compose.gpu.yml")
    taken = {name: environment["CUDA_VISIBLE_DEVICES"] for name, environment in told.items()}
    assert taken == {"prefill": "${PREFILL_GPU:-0}", "decode": "${DECODE_GPU:-1}"}
    services = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text())["services"]
    for service in services.values():
        (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (devices["driver"], devices["count"]) == ("nvidia", "all")
        assert (service["ipc"], service["pid"]) == ("host", "host")


def test_a_batch_processor_has_the_limits_of_a_gateway() -> None:
    found = environments("docker-compose.yml")
    only_clients = {"API_KEY_FILE", "ADMIN_KEY_FILE", "API_KEYS_FILE", "CORS_ORIGINS"}
    assert found["gateway"].keys() - found["batches"].keys() == only_clients
