"""Settings: defaults, what is allowed, and that docs/settings.md says the same."""

from pathlib import Path

import pytest

from relay.settings import Settings, SettingsError, table

DOC = Path(__file__).parents[2] / "docs" / "settings.md"


def test_unset_and_empty_variables_mean_the_default() -> None:
    assert Settings.from_env({}) == Settings.from_env({"PORT": "", "MODEL": " "}) == Settings()


def test_values_are_read_in_their_type() -> None:
    settings = Settings.from_env(
        {"PORT": "9", "QUARANTINE_SHARE": "0.5", "KV_DIGEST": "true", "DTYPE": "float32", "SERVED_NAME": "m"}
    )
    assert (settings.port, settings.quarantine_share, settings.kv_digest) == (9, 0.5, True)
    assert (settings.dtype, settings.model_name) == ("float32", "m")
    assert Settings.from_env({"LOG_LEVEL": "debug"}).log_level == "DEBUG"


def test_the_broker_is_redis_unless_set() -> None:
    assert Settings.from_env({"REDIS_URL": "redis://r/1"}).celery_broker == "redis://r/1"
    assert Settings.from_env({"BROKER_URL": "redis://b/2"}).celery_broker == "redis://b/2"


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("PORT", "http", "whole number, 1 to 65535"),
        ("PORT", "0", "whole number, 1 to 65535"),
        ("LEASE_MS", "3.5", "whole number, 2000 to 60000"),
        ("QUARANTINE_SHARE", "nan", "number, 0.01 to 1"),
        ("QUARANTINE_SHARE", "2", "number, 0.01 to 1"),
        ("DTYPE", "fp8", "float32, bfloat16, float16"),
        ("LOG_LEVEL", "verbose", "DEBUG, INFO, WARNING, ERROR, CRITICAL"),
        ("KV_DIGEST", "maybe", "0, 1, true, false"),
        ("FILES_URL", "ftp://host/folder", "path, or URL with s3://"),
    ],
)
def test_an_error_names_variable_value_and_what_is_allowed(name: str, value: str, allowed: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_env({name: value})
    message = str(caught.value)
    assert name in message
    assert repr(value) in message
    assert allowed in message


def test_the_document_lists_every_setting_as_the_code_has_it() -> None:
    assert table() in DOC.read_text()
