"""How gunicorn serves the gateway: one process, one reader on Redis, a thread per stream."""

import ctypes
import resource
import socket
import struct
from typing import Any

from app.launch.address import netloc
from app.launch.supervisor import die_with_parent
from relay.settings import Settings

_M_ARENA_MAX = -8  # malloc.h of glibc; other libraries have no mallopt, or ignore it
_ARENAS = 2
_RECEIVE_S = 10  # the longest pause within a request's head or body
_SEND_S = 60  # the longest time in which a client reads nothing of what waits for it

_settings = Settings.from_env()

bind = netloc(_settings.host, _settings.port)
worker_class = "app.gateway.gateway_worker.GatewayWorker"
workers = 1
threads = _settings.gateway_threads
worker_connections = 2 * _settings.gateway_threads  # those beyond `threads` are kept alive, idle
keepalive = 75
timeout = 60
graceful_timeout = _settings.grace_s
preload_app = False  # connections and the reader thread must be made after the fork
control_socket_disable = True  # one path for all gateways of a user, and nobody uses it
accesslog = None  # the app logs each request itself


def when_ready(server: Any) -> None:
    """Each stalled client would hold a thread for ever. What a listener accepts inherits its timeouts."""
    for listener in server.LISTENERS:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _RECEIVE_S, 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))


def post_fork(server: Any, worker: Any) -> None:
    """A worker that drains would outlive a killed master by its whole grace period."""
    die_with_parent(server.pid)
    _use_few_arenas()
    _allow_many_files()


def _allow_many_files() -> None:
    """A connection each; shells give 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _use_few_arenas() -> None:
    """By default there are eight per core for all the threads, and each keeps what a long prompt took."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_ARENA_MAX, _ARENAS)
