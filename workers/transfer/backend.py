"""Which transport carries KV, by name."""

from workers.transfer.base import KVManager
from workers.transfer.memory import KVMemory

BACKENDS = ("nixl", "loopback")


def kv_manager(
    backend: str, boot: str, memory: KVMemory, rows: int, post_bytes: int, digest: bool = False
) -> KVManager:
    """The process's KVManager. `boot` names its agent, `rows` bounds the rooms that can be received at a
    time.

    Raises ValueError for an unknown backend, RuntimeError when it cannot start.
    """
    if backend == "nixl":
        from workers.transfer.nixl import NixlManager  # the wheel is only needed when it is used

        return NixlManager(boot, memory, rows, post_bytes, digest)
    if backend == "loopback":
        from workers.transfer.loopback import LoopbackManager

        return LoopbackManager(boot, memory, rows, post_bytes, digest)
    raise ValueError(f"unknown transfer backend {backend!r}: choose one of {', '.join(BACKENDS)}")
