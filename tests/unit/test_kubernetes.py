"""The manifests of deploy/kubernetes: what the schemas of Kubernetes allow, and what kvrelay asks of them."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from relay.settings import Settings

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
BASE = FOLDER / "base"
STOP_S = 10  # what a drain needs beyond GRACE_S: docs/operations.md


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def merged(below: Any, above: Any) -> Any:
    """As a strategic merge does it: objects by key, containers and variables by name, all else replaced."""
    if isinstance(below, dict) and isinstance(above, dict):
        return below | {key: merged(below.get(key), value) for key, value in above.items()}
    if isinstance(below, list) and isinstance(above, list) and all("name" in item for item in below + above):
        by_name = {item["name"]: item for item in below}
        changed = {item["name"]: merged(by_name.get(item["name"]), item) for item in above}
        return list((by_name | changed).values())
    return above


KUSTOMIZATION = documents(BASE / "kustomization.yaml")[0]
OBJECTS = [each for name in KUSTOMIZATION["resources"] for each in documents(BASE / name)]
PATCH = documents(FOLDER / "gpu" / "worker.yaml")[0]
ON_GPUS = [
    each | {"spec": merged(each["spec"], PATCH["spec"])}
    for each in OBJECTS
    if each["kind"] == "StatefulSet" and each["metadata"]["name"] in ("prefill", "decode")
]
RUNNING = [each for each in OBJECTS if "template" in each["spec"]]
SETTINGS = dict(line.split("=", 1) for line in (BASE / "settings.env").read_text().split())


def name_of(each: dict[str, Any]) -> str:
    return f"{each['kind']}-{each['metadata']['name']}"


@pytest.mark.parametrize("each", OBJECTS + ON_GPUS, ids=name_of)
def test_the_schemas_allow_it(each: dict[str, Any]) -> None:
    kubernetes_validate.validate(each, "1.37", strict=True)


def test_every_file_is_listed() -> None:
    assert set(KUSTOMIZATION["resources"]) | {"kustomization.yaml"} == {p.name for p in BASE.glob("*.yaml")}


@pytest.mark.parametrize("each", RUNNING, ids=name_of)
def test_a_pod_has_no_more_rights_than_it_needs(each: dict[str, Any]) -> None:
    pod = each["spec"]["template"]["spec"]
    assert not pod["automountServiceAccountToken"]
    assert not pod["enableServiceLinks"], "FLOWER_PORT of the Service is no port number"
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    rights = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert container["securityContext"] == rights
    assert container["image"] == "kvrelay"
    assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("each", RUNNING, ids=name_of)
def test_selectors_and_volumes_fit(each: dict[str, Any]) -> None:
    template = each["spec"]["template"]
    wanted = each["spec"]["selector"]["matchLabels"].items()
    assert wanted <= template["metadata"]["labels"].items()
    volumes = template["spec"].get("volumes", []) + [
        claim["metadata"] for claim in each["spec"].get("volumeClaimTemplates", [])
    ]
    mounts = template["spec"]["containers"][0]["volumeMounts"]
    assert {mount["name"] for mount in mounts} == {volume["name"] for volume in volumes}


def test_what_drains_has_the_time_for_it() -> None:
    for each in RUNNING:
        if each["metadata"]["name"] in ("prefill", "decode", "gateway"):
            pod = each["spec"]["template"]["spec"]
            assert pod["terminationGracePeriodSeconds"] >= int(SETTINGS["GRACE_S"]) + STOP_S


def test_settings_are_settings() -> None:
    variables = set(SETTINGS) | {
        variable["name"]
        for each in RUNNING + ON_GPUS
        for variable in each["spec"]["template"]["spec"]["containers"][0].get("env", [])
    }
    known = {name.upper() for name in Settings.__dataclass_fields__} | {"FLOWER_BASIC_AUTH"}
    assert {name.removesuffix("_FILE") for name in variables} <= known


def test_gpus_are_asked_for() -> None:
    for each in ON_GPUS:
        (container,) = each["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert container["command"][:2] == ["kvrelay", "worker"]
