"""A Sentinel and its master that both speak TLS only and ask for passwords."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from redis.exceptions import ConnectionError, RedisError

from relay.redis_client import probe_client
from tests.processes import until
from tests.relay_rig import celery_app
from tests.servers import free_port, redis_binary


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    binary = redis_binary()
    if binary is None:
        pytest.skip("redis-server is not installed: run tests/setup.sh to test Sentinel")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    tls = (
        f"bind 127.0.0.1\nport 0\ntls-replication yes\ntls-auth-clients no\n"
        f"tls-ca-cert-file {tmp_path}/ca.pem\n"
        f"tls-cert-file {tmp_path}/server.pem\ntls-key-file {tmp_path}/server.pem\n"
    )
    master, sentinel = free_port(), free_port()
    configs = {
        "master": f"tls-port {master}\nrequirepass of-redis\nsave ''\n",
        "sentinel": (
            f"tls-port {sentinel}\ndir {tmp_path}\nrequirepass of-sentinel\n"
            f"sentinel monitor main 127.0.0.1 {master} 1\nsentinel auth-pass main of-redis\n"
        ),
    }
    processes = []
    for name, config in configs.items():
        path = tmp_path / f"{name}.conf"
        path.write_text(tls + config)
        mode = ["--sentinel"] if name == "sentinel" else []
        with (tmp_path / f"{name}.log").open("wb") as log:
            command = [str(binary), str(path), *mode]
            processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path))
    yield (
        f"sentinels://:of-redis@127.0.0.1:{sentinel}/main"
        f"?ssl_ca_certs={tmp_path}/ca.pem&sentinel_password=of-sentinel"
    )
    for process in processes:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        return bool(probe_client(url, 2.0).ping())
    except RedisError:
        return False


def test_redis_and_celery_find_the_master(url: str) -> None:
    until(lambda: answers(url), "the master is found and answers")
    with celery_app(url).connection_for_write() as connection:
        connection.ensure_connection(max_retries=1)
        assert connection.default_channel.client.ping()


def test_nobody_is_believed_without_the_authority(url: str) -> None:
    until(lambda: answers(url), "the master is found and answers")
    strangers = re.sub(r"ssl_ca_certs=[^&]*&", "", url)
    with pytest.raises(ConnectionError, match=r"no Sentinel names .* certificate verify failed"):
        probe_client(strangers, 2.0).ping()
