"""The URL of a Redis: what it may say, and how redis-py and Celery each want to hear it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from redis import Connection, ConnectionPool, Redis, SSLConnection, UnixDomainSocketConnection
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, TimeoutError
from redis.retry import Retry
from redis.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection

Pool = TypeVar("Pool", bound=ConnectionPool)

FORMS = (
    "redis://[user:password@]host[:port][/db]",
    "rediss:// for TLS",
    "unix:///path[?db=n]",
    "sentinel://[user:password@]host[:port],host[:port]/master[?db=n]",
    "sentinels:// for TLS",
)
_SCHEMES = ("redis", "rediss", "unix", "sentinel", "sentinels")
_REDIS_PORT, _SENTINEL_PORT = 6379, 26379
_SENTINEL_TIMEOUT_S = 0.5  # each: the ones after it must have their turn within a command's own time
_CERTIFICATE_RULES = ("required", "optional", "none")
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


class CeleryBroker(NamedTuple):
    """What Celery's `broker_url`, `broker_transport_options` and `broker_use_ssl` are to be."""

    url: str
    transport_options: dict[str, Any]
    use_ssl: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """`hosts` are servers, or the Sentinels that know which server is the `master`."""

    scheme: str
    hosts: tuple[tuple[str, int], ...]
    path: str = ""  # of a socket
    master: str = ""
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: Mapping[str, Any] | None = None
    sentinel_login: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def parse(cls, text: str) -> "RedisUrl":
        """Raises ValueError for what is none of `FORMS`, and for an option that is not known."""
        parts = urlsplit(text)
        if parts.scheme not in _SCHEMES:
            raise ValueError(f"none of {', '.join(_SCHEMES)}")
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        login, _, hosts = parts.netloc.rpartition("@")
        username, _, password = login.partition(":")
        servers, path, master = _hosts(hosts, _REDIS_PORT)[:1], "", ""
        if parts.scheme == "unix":
            servers, path = (), unquote(parts.path)
        elif parts.scheme.startswith("sentinel"):
            servers, master = _hosts(hosts, _SENTINEL_PORT), unquote(parts.path[1:])
            if not master or "/" in master:
                raise ValueError("the name of the master comes after the hosts")
        else:
            options.setdefault("db", parts.path[1:] or "0")
        url = cls(
            parts.scheme,
            servers,
            path,
            master,
            db=int(options.pop("db", "0")),
            username=unquote(username) or None,
            password=unquote(password) or None,
            tls=_tls(options) if parts.scheme in ("rediss", "sentinels") else None,
            sentinel_login={
                name: options.pop(f"sentinel_{name}")
                for name in ("username", "password")
                if f"sentinel_{name}" in options
            },
        )
        if options:
            raise ValueError(f"unknown options: {', '.join(options)}")
        return url

    def __str__(self) -> str:
        """Without the password: for people and logs."""
        login = f"{self.username or ''}:***@" if self.password else ""
        where = self.path or _netloc(self.hosts)
        return f"{self.scheme}://{login}{where}/{self.master or self.db}"

    def pool(self, kind: type[Pool], **options: Any) -> Pool:
        """A pool of connections to the server, or to whichever is the master when one is made."""
        options |= {"db": self.db, "username": self.username, "password": self.password}
        if self.scheme == "unix":
            options.pop("socket_keepalive", None)
            return kind(connection_class=UnixDomainSocketConnection, path=self.path, **options)
        options |= self.tls or {}
        if self.master:
            managed = SentinelManagedConnection if self.tls is None else SentinelManagedSSLConnection
            return kind(connection_class=managed, connection_pool=_Master(self), **options)
        host, port = self.hosts[0]
        return kind(
            connection_class=Connection if self.tls is None else SSLConnection,
            host=host,
            port=port,
            **options,
        )

    def sentinel_options(self) -> dict[str, Any]:
        """How a Sentinel is reached."""
        tls = {"ssl": True, **self.tls} if self.tls is not None else {}
        return {
            "socket_timeout": _SENTINEL_TIMEOUT_S,
            "socket_connect_timeout": _SENTINEL_TIMEOUT_S,
            **self.sentinel_login,
            **tls,
        }

    def celery(self) -> CeleryBroker:
        use_ssl = dict(self.tls) if self.tls is not None else None
        if self.scheme == "unix":
            return CeleryBroker(f"redis+socket://{self.path}?virtual_host={self.db}", {}, None)
        login = ""
        if self.username or self.password:
            login = f"{quote(self.username or '', safe='')}:{quote(self.password or '', safe='')}@"
        if not self.master:
            return CeleryBroker(f"{self.scheme}://{login}{_netloc(self.hosts)}/{self.db}", {}, use_ssl)
        url = ";".join(f"sentinel://{login}{_netloc([host])}/{self.db}" for host in self.hosts)
        options = {"master_name": self.master, "sentinel_kwargs": self.sentinel_options()}
        return CeleryBroker(url, options, use_ssl)


class _Master:
    """What redis-py's connections ask of a Sentinel pool, for any kind of pool and from any thread."""

    is_master = True
    check_connection = False

    def __init__(self, url: RedisUrl) -> None:
        self.service_name = url.master
        self._options = {**url.sentinel_options(), "retry": Retry(NoBackoff(), 0)}
        self._sentinels = list(url.hosts)

    def get_master_address(self) -> tuple[str, int]:
        """Raises ConnectionError when no Sentinel names a living master."""
        problems = []
        for sentinel in self._sentinels:
            try:
                master = self._seen_by(*sentinel)
            except (ConnectionError, TimeoutError) as error:
                problems.append(str(error))
                continue
            if master and master["is_master"] and not (master["is_sdown"] or master["is_odown"]):
                self._sentinels = [sentinel, *(other for other in self._sentinels if other != sentinel)]
                return master["ip"], master["port"]
            problems.append(f"{_netloc([sentinel])} {'sees it down' if master else 'knows none'}")
        raise ConnectionError(f"no Sentinel names a living master {self.service_name}: {'; '.join(problems)}")

    def _seen_by(self, host: str, port: int) -> dict[str, Any] | None:
        with Redis(host=host, port=port, **self._options) as sentinel:
            masters: Any = sentinel.sentinel_masters()
        found: dict[str, Any] | None = masters.get(self.service_name)
        return found


def _hosts(text: str, port: int) -> tuple[tuple[str, int], ...]:
    found = []
    for each in text.split(","):
        parts = urlsplit(f"//{each}")
        found.append((parts.hostname or "127.0.0.1", parts.port or port))
    return tuple(found)


def _netloc(hosts: Any) -> str:
    return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in hosts)


def _tls(options: dict[str, str]) -> dict[str, Any]:
    """What redis-py's SSLConnection takes; a server is believed when its certificate is, and names it."""
    rule = options.pop("ssl_cert_reqs", "required")
    if rule not in _CERTIFICATE_RULES:
        raise ValueError(f"ssl_cert_reqs={rule}: one of {', '.join(_CERTIFICATE_RULES)}")
    check = options.pop("ssl_check_hostname", "false" if rule == "none" else "true").lower()
    if check not in ("true", "false"):
        raise ValueError(f"ssl_check_hostname={check}: true or false")
    files = {name: options.pop(name) for name in _FILES if name in options}
    return {"ssl_cert_reqs": rule, "ssl_check_hostname": check == "true", **files}
