"""Server-side function libraries: each is loaded when the server lacks it or holds another version."""

from importlib.resources import files
from threading import Lock
from typing import Any, cast

from redis import Redis
from redis.exceptions import ConnectionError, ResponseError

from relay.protocol import OTHER_PROTOCOL, Protocol

# What a server says that cannot write now and will again: a full disk, a slow script, replicas that lag.
_PASSES = ("MISCONF", "BUSY ", "NOREPLICAS")


class UnsupportedServer(RuntimeError):
    """The server lacks what is needed, or would evict open requests; the message says what to change."""


class Functions:
    """Calls functions of a source file, with one key, the root of a model's keys. Thread-safe.

    A library and its functions bear the number of the protocol, so that models of two versions can share the
    server."""

    def __init__(
        self,
        redis: Redis,
        root: str,
        protocol: Protocol,
        source: str = "rooms.lua",
        library: str = "kvrelay",
    ) -> None:
        self._redis = redis
        self._root = root
        self._protocol = protocol
        code = files("relay").joinpath(source).read_text()
        self._code = code.replace("$PROTOCOL", str(protocol.number)).encode()
        self._library = f"{library}_{protocol.number}"
        self._lock = Lock()
        self._checked = False

    def call(self, name: str, *args: str | bytes | int | float) -> Any:
        """Raises what redis-py raises, UnsupportedServer and ProtocolMismatch. Who may not write now counts
        as away."""
        try:
            return self._call(name, cast(tuple[str, ...], args))
        except ResponseError as error:
            if str(error).startswith(_PASSES):
                raise ConnectionError(str(error)) from error
            raise

    def _call(self, name: str, args: tuple[str, ...]) -> Any:
        if not self._checked:
            self._load()
        try:
            return self._redis.fcall(f"{self._library}_{name}", 1, self._root, *args)
        except ResponseError as error:
            # A restart without persistence or a flush may have taken the library away, or the number.
            if "Function not found" in str(error):
                self._load()
            elif OTHER_PROTOCOL in str(error):
                self._protocol.agree()
            else:
                raise
        return self._redis.fcall(f"{self._library}_{name}", 1, self._root, *args)

    def _load(self) -> None:
        with self._lock:
            try:
                self._check_eviction()
                self._protocol.agree()
                held = cast(list[list[Any]], self._redis.function_list(library=self._library, withcode=True))
                if not held or self._code not in held[0]:
                    self._redis.function_load(cast(str, self._code), replace=True)
            except ResponseError as error:
                if "unknown command" not in str(error).lower():
                    raise
                raise UnsupportedServer(
                    "this server has no function libraries: use Redis 7.0 or Valkey 7.2, or newer"
                ) from error
            self._checked = True

    def _check_eviction(self) -> None:
        memory: Any = self._redis.info("memory")
        policy = memory["maxmemory_policy"]
        if memory["maxmemory"] and policy.startswith("allkeys"):
            raise UnsupportedServer(f"maxmemory-policy {policy} would evict requests: set it to noeviction")
