"""The whole relay against a Redis that speaks TLS only, as the ACL user of docs/hosts.md."""

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import trustme
from redis import Redis
from redis.exceptions import ConnectionError

from relay.request import State
from relay.rooms import Rooms
from tests.flower_rig import FlowerProcess
from tests.gateway_rig import GatewayProcess
from tests.processes import until
from tests.relay_rig import ROOT, Relay, tiny_model
from tests.servers import RedisServer, free_port, redis_binary

DOC = ROOT / "docs" / "hosts.md"
PASSWORD = "p@ss/word:1"
ADMIN = "the key of an admin"


def acl_rules() -> list[str]:
    """Of the user that the document says suffices; the password there is an example."""
    (line,) = re.findall(r"^user kvrelay (.*)$", DOC.read_text(), re.M)
    return [rule for rule in line.split() if not rule.startswith(">")]


class SecuredServer(RedisServer):
    """TLS with a certificate of its own authority, and nobody but one ACL user and an admin on a socket."""

    def __init__(self, binary: Path, directory: Path) -> None:
        authority = trustme.CA()
        certificate = authority.issue_cert("127.0.0.1")
        directory.mkdir(parents=True)
        self.authority = directory / "ca.pem"
        authority.cert_pem.write_to_path(self.authority)
        certificate.private_key_pem.write_to_path(directory / "key.pem")
        for part in certificate.cert_chain_pems:
            part.write_to_path(directory / "cert.pem", append=True)
        self._socket = directory / "admin.sock"
        tls_port = free_port()
        super().__init__(
            binary,
            directory,
            options=[
                *("--port", "0", "--tls-port", str(tls_port), "--tls-auth-clients", "no"),
                *("--tls-cert-file", str(directory / "cert.pem")),
                *("--tls-key-file", str(directory / "key.pem")),
                *("--unixsocket", str(self._socket)),
            ],
        )
        self.port = tls_port

    @property
    def url(self) -> str:
        login = f"kvrelay:{quote(PASSWORD, safe='')}"
        return f"rediss://{login}@127.0.0.1:{self.port}/0?ssl_ca_certs={self.authority}"

    def client(self) -> Redis:
        return Redis(unix_socket_path=str(self._socket), username="admin", password=PASSWORD)

    def start(self) -> None:
        users = self.directory / "users.acl"
        users.write_text(
            "user default off\n"
            f"user admin on >{PASSWORD} ~* &* +@all\n"
            f"user kvrelay {' '.join(acl_rules())} >{PASSWORD}\n"
        )
        self._options += ["--aclfile", str(users)]
        super().start()


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    binary = redis_binary()
    if binary is None:
        pytest.skip("redis-server is not installed: run tests/setup.sh to test TLS")
    with SecuredServer(binary, tmp_path_factory.mktemp("secured") / "redis") as server:
        yield server


@pytest.fixture(scope="module")
def pair(secured: SecuredServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    folder = tmp_path_factory.mktemp("workers")
    relay = Relay(secured, folder, "secured", MODEL=str(tiny_model(folder / "tiny")))
    try:
        relay.start("prefill", "decode")
        relay.ready()
        yield relay
    finally:
        relay.close()


def refused(server: SecuredServer) -> set[str]:
    """What the server has denied the user so far."""
    with server.client() as admin:
        entries = admin.acl_log()
    return {f"{entry['reason']} {entry['object']}" for entry in entries}


def test_requests_run_and_nothing_they_need_is_denied(
    secured: SecuredServer, pair: Relay, tmp_path: Path
) -> None:
    prompt = tuple(range(5, 45))
    assert pair.ask(prompt, ignore_eos=True).end.state is State.FINISHED
    samples = pair.submit_samples(prompt, 3, ignore_eos=True)
    assert {pair.wait(sample).end.state for sample in samples} == {State.FINISHED}

    assert [engine["held_pages"] for engine in pair.engines()] == [0, 0]  # asked and answered by the broker
    assert pair.rooms.cancel(pair.submit(prompt)).record

    model = {"MODEL": pair.env["MODEL"], "ADMIN_KEY": ADMIN}
    with GatewayProcess(secured.url, "secured", tmp_path / "gateway.log", **model) as gateway:
        assert gateway.call("GET", "/ready").status == 200
        body = {"model": "secured", "prompt": "Hello", "max_tokens": 5, "stream": True}
        events = gateway.stream("POST", "/v1/completions", body).events()
        assert events[-1].data == "[DONE]"
        assert gateway.call("GET", "/metrics").status == 200
        assert gateway.call("GET", "/v1/batches").status == 200
        assert gateway.call("POST", "/flush_cache", Authorization=f"Bearer {ADMIN}").status == 200
    assert refused(secured) == set()


def test_flower_sees_workers_and_queues(secured: SecuredServer, pair: Relay, tmp_path: Path) -> None:
    names = {card.name for card in pair.cards()}
    with FlowerProcess(pair.env, tmp_path) as flower:
        until(lambda: names <= flower.workers(), "Flower shows both workers")
        assert flower.messages() == [0, 0]
    assert refused(secured) == set()


def test_without_the_authority_nobody_is_believed(secured: SecuredServer) -> None:
    rooms = Rooms(secured.url.partition("?")[0], "secured")
    with pytest.raises(ConnectionError, match="certificate verify failed"):
        rooms.workers()
    rooms.close()
