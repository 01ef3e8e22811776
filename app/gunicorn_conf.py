"""How gunicorn serves the gateway: one process, one reader on Redis, a thread per stream."""

from typing import Any

from app.supervisor import die_with_parent
from relay.settings import Settings

_settings = Settings.from_env()

bind = f"{_settings.host}:{_settings.port}"
worker_class = "gthread"
workers = 1
threads = _settings.gateway_threads
worker_connections = 2 * _settings.gateway_threads  # those beyond `threads` are kept alive, idle
keepalive = 75
timeout = 60
graceful_timeout = _settings.grace_s
preload_app = False  # connections and the reader thread must be made after the fork
control_socket_disable = True  # one path for all gateways of a user, and nobody uses it
accesslog = None  # the app logs each request itself


def post_fork(server: Any, worker: Any) -> None:
    """A worker that drains would outlive a killed master by its whole grace period."""
    die_with_parent(server.pid)
