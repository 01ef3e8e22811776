"""What REDIS_URL may say, and what Celery and people are told of it."""

import pytest

from relay.redis_url import RedisUrl


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://host", "redis://host:6379/0"),
        ("redis://:secret@host:1/3", "redis://:***@host:1/3"),
        ("rediss://user:secret@[::1]/0?ssl_cert_reqs=none", "rediss://user:***@[::1]:6379/0"),
        ("unix:///run/redis.sock?db=2", "unix:///run/redis.sock/2"),
        ("sentinel://user:secret@a,b:1/main?db=2", "sentinel://user:***@a:26379,b:1/main"),
    ],
)
def test_it_is_shown_without_its_password(text: str, shown: str) -> None:
    url = RedisUrl.parse(text)
    assert str(url) == shown
    assert "secret" not in repr(url)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("localhost:6379", "none of redis"),
        ("http://host", "none of redis"),
        ("redis://host/main", "invalid literal"),
        ("redis://host?timeout=1", "unknown options: timeout"),
        ("redis://host?ssl_cert_reqs=none", "unknown options: ssl_cert_reqs"),
        ("rediss://host?ssl_cert_reqs=maybe", "one of required, optional, none"),
        ("rediss://host?ssl_check_hostname=maybe", "true or false"),
        ("sentinel://host", "the name of the master"),
        ("sentinel://host/main/0", "the name of the master"),
    ],
)
def test_what_cannot_be_used_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        RedisUrl.parse(text)


def test_celery_is_told_the_same() -> None:
    assert RedisUrl.parse("redis://u:p%40@h/1").celery() == ("redis://u:p%40@h:6379/1", {}, None)
    assert RedisUrl.parse("unix:///s?db=2").celery() == ("redis+socket:///s?virtual_host=2", {}, None)
    tls = {"ssl_cert_reqs": "required", "ssl_check_hostname": True, "ssl_ca_certs": "/ca.pem"}
    assert RedisUrl.parse("rediss://h?ssl_ca_certs=/ca.pem").celery() == ("rediss://h:6379/0", {}, tls)


def test_celery_is_told_of_sentinels() -> None:
    url, options, use_ssl = RedisUrl.parse(
        "sentinels://u:p@a,b:1/main?db=2&ssl_cert_reqs=none&sentinel_username=s&sentinel_password=t"
    ).celery()
    assert url == "sentinel://u:p@a:26379/2;sentinel://u:p@b:1/2"
    assert options["master_name"] == "main"
    assert use_ssl == {"ssl_cert_reqs": "none", "ssl_check_hostname": False}
    assert options["sentinel_kwargs"].items() >= {"username": "s", "password": "t", "ssl": True}.items()
    assert options["sentinel_kwargs"].items() >= use_ssl.items()
