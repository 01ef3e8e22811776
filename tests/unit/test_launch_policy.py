"""What the launcher decides without touching anything: cores, backoff, who may see Flower."""

import os
from pathlib import Path

import pytest

from app.launch.address import base_url
from app.launch.checks import CheckFailed, parse_cores, share_cores
from app.launch.programs import flower_env, worker_command
from app.launch.supervisor import MAX_BACKOFF_S, backoff_s
from relay.request import Leg
from relay.routing import node_name, queue_for, queue_of, short_name


def test_backoff_doubles_up_to_a_limit() -> None:
    assert [backoff_s(n) for n in range(5)] == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert backoff_s(1_000) == MAX_BACKOFF_S


@pytest.mark.parametrize(
    ("cores", "workers", "shares"),
    [
        ((0, 1), 2, [{0}, {1}]),
        ((0, 1, 2, 3, 4), 2, [{0, 1, 2}, {3, 4}]),
        ((4, 6, 8), 1, [{4, 6, 8}]),
        ((0,), 2, [None, None]),
        ((), 1, [None]),
    ],
)
def test_each_worker_has_cores_of_its_own_or_none_has(
    cores: tuple[int, ...], workers: int, shares: list[set[int] | None]
) -> None:
    assert share_cores(cores, workers) == shares


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    cores = {0, 1, 2, 3, 6}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    return cores


def test_cores_are_ranges_and_numbers(usable: set[int]) -> None:
    assert parse_cores("0-2,6") == (0, 1, 2, 6)
    assert parse_cores("") == (0, 1, 2, 3, 6)
    assert parse_cores("none") == ()


@pytest.mark.parametrize(
    ("text", "says"), [("all", "0-3,6"), ("1-", "0-3,6"), ("3-1", "0-3,6"), ("3-5", "[4, 5]")]
)
def test_wrong_cores_are_named(usable: set[int], text: str, says: str) -> None:
    with pytest.raises(CheckFailed) as caught:
        parse_cores(text)
    assert text in str(caught.value)
    assert says in str(caught.value)


def test_flower_beyond_loopback_has_a_password(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FLOWER_BASIC_AUTH", raising=False)
    with pytest.raises(PermissionError, match="FLOWER_BASIC_AUTH=user:password"):
        flower_env("0.0.0.0")
    secret = tmp_path / "flower_auth"
    secret.write_text("ann:secret\n")
    monkeypatch.setenv("FLOWER_BASIC_AUTH_FILE", str(secret))
    assert flower_env("0.0.0.0") == {"FLOWER_BASIC_AUTH": "ann:secret"}
    assert flower_env("127.0.0.1") == {"FLOWER_BASIC_AUTH": "ann:secret"}, "whoever sets one wants it"


@pytest.mark.parametrize(
    ("model", "name", "node"),
    [
        ("SmolLM2-135M", None, "decode.SmolLM2-135M@%h"),
        ("SmolLM2-135M", "decode-2", "decode-2.SmolLM2-135M@%h"),
        ("org/a model@100%", None, "decode.org-a-model-100-@%h"),
    ],
)
def test_workers_of_two_models_on_a_host_have_names_of_their_own(
    model: str, name: str | None, node: str
) -> None:
    command = worker_command("decode", model, name)
    assert command[command.index("-n") + 1] == node


def test_a_short_name_is_the_one_that_was_given() -> None:
    node = f"{node_name('decode.2', 'org/a model')}@host"
    assert (node, short_name(node, "org/a model")) == ("decode.2.org-a-model@host", "decode.2")
    assert short_name("decode@test", "m") == "decode"


def test_what_listens_everywhere_is_asked_on_the_loopback() -> None:
    hosts = ("10.0.0.1", "0.0.0.0", "::", "fd00::2")
    assert [base_url(host, 8000) for host in hosts] == [
        "http://10.0.0.1:8000",
        "http://127.0.0.1:8000",
        "http://[::1]:8000",
        "http://[fd00::2]:8000",
    ]


def test_a_queue_is_one_to_celery_whatever_the_model_is_called() -> None:
    assert queue_for("decode", "org/a,b v1") == "decode.org/a-b v1"
    assert queue_for("unified", "a,b") == queue_of(Leg.PREFILL, "a,b")
