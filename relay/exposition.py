"""How a process answers Prometheus: one registry, whose every sample says which process it is of."""

import socket
from collections.abc import Iterable

from prometheus_client import (
    CollectorRegistry,
    ProcessCollector,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client.core import Metric

from relay.redis_url import RedisUrl
from relay.settings import Settings, SettingsError

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each that nobody plots


class Registry(CollectorRegistry):
    """`labels` are added to every sample when it is read, so that counting costs nothing more."""

    def __init__(self, **labels: str) -> None:
        super().__init__()
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        for metric in super().collect():
            metric.samples = [
                sample._replace(labels={**self._labels, **sample.labels}) for sample in metric.samples
            ]
            yield metric


def process_registry(model: str, role: str, **more: str) -> Registry:
    """For what one process knows of itself; its CPU time, memory and start are in it."""
    registry = Registry(model_name=model, role=role, **more)
    ProcessCollector(registry=registry)
    return registry


def serve(registry: CollectorRegistry, settings: Settings) -> None:
    """Answer on METRICS_PORT, from a thread of its own, until the process ends; nothing if that is 0.

    Raises SettingsError when the port cannot be used.
    """
    if not settings.metrics_port:
        return
    try:
        start_http_server(settings.metrics_port, settings.host, registry)
    except OSError as error:
        raise SettingsError(
            f"METRICS_PORT={settings.metrics_port} cannot be used on {settings.host} ({error.strerror}): "
            "give each process of a host its own"
        ) from None


def metrics_address(settings: Settings) -> str:
    """host:port where others reach what `serve` answers; nothing if it does not. Where it listens on every
    address, that is the one which faces Redis."""
    if not settings.metrics_port:
        return ""
    host = settings.host if settings.host not in ("0.0.0.0", "::") else _address_towards(settings.redis_url)
    return f"[{host}]:{settings.metrics_port}" if ":" in host else f"{host}:{settings.metrics_port}"


def _address_towards(url: str) -> str:
    """This machine's address on the way to the (first) host of `url`; nothing is sent."""
    try:
        host, port = next(iter(RedisUrl.parse(url).hosts), ("", 0))
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:  # a name that cannot be resolved now, or a Unix socket
        return socket.gethostname()
