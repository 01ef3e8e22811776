"""kombu's transports over Redis, with one client for each pool: kombu makes one for each command, which takes
a third of its time."""

from typing import Any

from kombu.transport import TRANSPORT_ALIASES, redis


class _Lasting:
    """A channel that keeps the client through which it sends."""

    _kept: Any = None

    def _create_client(self, asynchronous: bool = False) -> Any:
        this: Any = super()
        if asynchronous:  # these wait, each on a connection of its own, and kombu keeps them
            return this._create_client(asynchronous)
        if self._kept is None or self._kept.connection_pool is not self.pool:  # type: ignore[attr-defined]
            self._kept = this._create_client()
        return self._kept


class _Channel(_Lasting, redis.Channel):
    pass


class _SentinelChannel(_Lasting, redis.SentinelChannel):
    pass


class Transport(redis.Transport):
    Channel = _Channel


class SentinelTransport(redis.SentinelTransport):
    Channel = _SentinelChannel


def use_lasting_clients() -> None:
    """In this process, under the names by which URLs mean kombu's own."""
    for name in ("redis", "rediss"):
        TRANSPORT_ALIASES[name] = f"{__name__}:{Transport.__name__}"
    TRANSPORT_ALIASES["sentinel"] = f"{__name__}:{SentinelTransport.__name__}"
