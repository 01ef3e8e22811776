"""How gunicorn serves the gateway: one process, one reader on Redis, a thread per stream."""

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
accesslog = None  # the app logs each request itself
