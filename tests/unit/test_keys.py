"""API keys: who a secret stands for, what a key file may hold, and how it changes while the gateway runs."""

import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from app.cli import cli
from app.gateway import keys
from app.gateway.keys import EVERYBODY, Caller, KeyRing, digest, new_key, stanza
from relay.settings import Settings, SettingsError

USER, ADMIN = "user-key-0123456789", "admin-key-0123456789"


def ring(**settings: Any) -> KeyRing:
    return KeyRing.from_settings(Settings(**settings))


def test_without_keys_everybody_may_call_and_nobody_is_admin() -> None:
    for secret in (None, "", "anything"):
        assert ring().caller(secret) == EVERYBODY
    assert not EVERYBODY.admin


def test_with_a_key_only_its_holder_may_call() -> None:
    keys = ring(api_key=USER, admin_key=ADMIN)
    assert keys.caller(USER) == Caller("default")
    assert keys.caller(ADMIN) == Caller("admin", admin=True)
    assert [keys.caller(secret) for secret in (None, "", USER[:-1], USER + "x", digest(USER))] == [None] * 5


def test_an_admin_key_alone_locks_nobody_out() -> None:
    keys = ring(admin_key=ADMIN)
    assert keys.caller(None) == EVERYBODY
    assert keys.caller(ADMIN) == Caller("admin", admin=True)


def test_an_empty_file_lets_nobody_in(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text("")
    assert ring(api_keys_file=str(tmp_path / "keys.toml")).caller(None) is None


def test_a_file_names_callers_and_their_limits(tmp_path: Path) -> None:
    secret, other = new_key(), new_key()
    path = tmp_path / "keys.toml"
    path.write_text(stanza("team-a", secret) + "tokens_per_minute = 9\n" + stanza("ops", other, admin=True))
    keys = ring(api_keys_file=str(path))
    assert keys.caller(secret) == Caller("team-a", tokens_per_minute=9)
    assert keys.caller(other) == Caller("ops", admin=True)
    assert secret not in path.read_text()


@pytest.mark.parametrize("name", ["team.a", "3", "a" * 64])
def test_what_the_command_writes_the_gateway_reads(tmp_path: Path, name: str) -> None:
    made = CliRunner().invoke(cli, ["key", name])
    (tmp_path / "keys.toml").write_text(made.stdout)
    assert ring(api_keys_file=str(tmp_path / "keys.toml")).caller(made.stderr.strip()) == Caller(name)


@pytest.mark.parametrize("name", ["", "my team", ".a", 'a"]\n["b', "a" * 65])
def test_the_command_refuses_a_name_that_a_file_may_not_hold(name: str) -> None:
    made = CliRunner().invoke(cli, ["key", "--", name])
    assert (made.exit_code, made.stdout) == (2, "")
    assert "WHOSE" in made.stderr


def test_a_changed_file_holds_soon_and_a_broken_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "_LOOK_AGAIN_S", 0.0)
    first, second = new_key(), new_key()
    path = tmp_path / "keys.toml"
    path.write_text(stanza("a", first))
    held = ring(api_keys_file=str(path))

    def replace(text: str) -> None:
        (tmp_path / "new").write_text(text)
        os.replace(tmp_path / "new", path)

    replace(stanza("b", second))
    assert (held.caller(first), held.caller(second)) == (None, Caller("b"))
    replace("[b\n")
    assert held.caller(second) == Caller("b")
    path.unlink()
    assert held.caller(second) == Caller("b")
    replace(stanza("a", first))
    assert (held.caller(first), held.caller(second)) == (Caller("a"), None)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[a]\n", "a.sha256"),
        ('[a]\nsha256 = "abc"\n', "a.sha256"),
        (stanza("a", "x" * 20) + "rpm = 3\n", "a.rpm"),
        (stanza("a", "x" * 20) + "tokens_per_minute = -1\n", "a.tokens_per_minute"),
        ('["a b"]\nsha256 = "' + "0" * 64 + '"\n', "a b"),
        (stanza("a", "x" * 20) + stanza("b", "x" * 20), "two names"),
        ("[a", "TOML"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match="API_KEYS_FILE=") as error:
        ring(api_keys_file=str(path))
    assert named in str(error.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        ring(api_keys_file=str(tmp_path / "none.toml"))


def test_who_may_see_what() -> None:
    assert Caller("a").may_see("a")
    assert not Caller("a").may_see("b")
    assert not Caller("a").may_see("")
    assert Caller("ops", admin=True).may_see("a")


def test_secrets_are_never_shown() -> None:
    assert USER not in repr(Settings(api_key=USER))
    with pytest.raises(SettingsError) as error:
        Settings.from_env({"API_KEY": "too-short"})
    assert "too-short" not in str(error.value)


def test_a_value_may_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(f"{USER}\n")
    assert Settings.from_env({"API_KEY_FILE": str(tmp_path / "secret")}).api_key == USER
    assert Settings.from_env({"API_KEY": ADMIN, "API_KEY_FILE": str(tmp_path / "secret")}).api_key == ADMIN
    with pytest.raises(SettingsError, match="API_KEY_FILE"):
        Settings.from_env({"API_KEY_FILE": str(tmp_path / "none")})
