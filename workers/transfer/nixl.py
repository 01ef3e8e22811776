"""KV by NIXL over UCX: one-sided writes into the peer's pool. The only module that knows NIXL.

There is no progress thread (it spins): writes advance while the transfer threads of both sides poll. The pool
and the rows are registered once, as whole regions; each peer's blocks are prepared once as one strided list.
"""

import contextlib
import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from relay.log import event
from workers.transfer.manager import TransferManager
from workers.transfer.memory import KVMemory, MemoryKind
from workers.transfer.metadata import ROW_BYTES
from workers.transfer.peer import Peer
from workers.transfer.rows import Rows
from workers.transfer.runs import IndexArray
from workers.transfer.transport import Handle, PeerLost, Table, Transport, TransportError

log = logging.getLogger(__name__)

WHEELS = ("nixl_cu13", "nixl_cu12")


class Write(NamedTuple):
    boot: str
    xfer: Any


class Lists(NamedTuple):
    """Prepared descriptor lists of one side."""

    pool: Any
    rows: Any

    def of(self, table: Table) -> Any:
        return self.pool if table is Table.POOL else self.rows


class NixlTransport(Transport):
    name = "nixl"

    def __init__(self, boot: str, memory: KVMemory, rows: Rows, source_rows: Rows) -> None:
        """Raises RuntimeError when NIXL is not installed or UCX does not start."""
        api = load_nixl()
        self._errors = error_classes(api)
        self._disconnected = api._bindings.nixlRemoteDisconnectError
        self._memory = memory
        self._agent = new_agent(api, boot)
        regions = [(table.address, table.size_bytes, 0, "") for table in (rows, source_rows)]
        pool_region = (memory.address, memory.size_bytes, memory.device, "")
        self._registered = [
            self._agent.register_memory([pool_region], memory.kind),
            self._agent.register_memory(regions, "DRAM"),
        ]
        self._local = Lists(
            self._pool_list("", memory.kind, memory.device, memory.address, memory.geometry.pages),
            self._rows_list("", source_rows.address, source_rows.count),
        )
        self._peers: dict[str, Lists] = {}
        self._unreleased: list[Any] = []

    @property
    def contact(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def begin(self) -> None:
        if self._memory.kind == "VRAM":
            bind_device(self._memory.device)

    def connect(self, peer: Peer) -> None:
        if peer.boot in self._peers:
            return
        with self._translated(peer.boot):
            name = self._agent.add_remote_agent(peer.contact).decode()
        if name != peer.boot:
            raise TransportError(f"the metadata of {peer.boot} is that of NIXL agent {name}")
        try:
            with self._translated(name):
                pool = self._pool_list(name, peer.memory, peer.device, peer.pool_address, peer.pages)
                rows = self._rows_list(name, peer.rows_address, peer.rows)
                self._agent.make_connection(name)
        except TransportError:
            self._disconnect(name)  # half a connection would keep later metadata of this agent out
            raise
        self._peers[name] = Lists(pool, rows)
        event(log, "peer_connected", peer=peer.boot, pages=peer.pages, rows=peer.rows)

    def greet(self, boot: str) -> None:
        with self._translated(boot):
            self._agent.send_notif(boot, b"")

    def make(self, boot: str, table: Table, local: IndexArray, remote: IndexArray) -> Handle:
        peer = self._peers.get(boot)
        if peer is None:
            raise PeerLost(f"no connection to decode worker {boot}")
        with self._translated(boot):
            xfer = self._agent.make_prepped_xfer(
                "WRITE", self._local.of(table), local, peer.of(table), remote
            )
            return Write(boot, xfer)

    def post(self, handle: Write) -> bool:
        with self._translated(handle.boot):
            return self._is_done(self._agent.transfer(handle.xfer))

    def check(self, handle: Write) -> bool:
        with self._translated(handle.boot):
            return self._is_done(self._agent.check_xfer_state(handle.xfer))

    def release(self, handle: Write) -> None:
        self._try_release(handle.xfer)

    def progress(self) -> None:
        with self._logged("progress_failed"):
            self._agent.get_new_notifs()  # greetings say nothing; asking is what makes UCX advance
        for xfer in [self._unreleased.pop() for _ in range(len(self._unreleased))]:
            self._try_release(xfer)

    def forget(self, boot: str) -> None:
        lists = self._peers.pop(boot, None)
        if lists is not None:
            self._disconnect(boot, lists)

    def close(self) -> None:
        for boot in tuple(self._peers):
            self.forget(boot)
        for dlist in self._local:
            with self._logged("dlist_not_released"):
                self._agent.release_dlist_handle(dlist)
        for region in self._registered:
            with self._logged("memory_not_deregistered"):
                self._agent.deregister_memory(region)

    def _disconnect(self, boot: str, lists: Lists | None = None) -> None:
        for dlist in lists or ():
            with self._logged("dlist_not_released", peer=boot):
                self._agent.release_dlist_handle(dlist)
        with self._logged("peer_not_removed", peer=boot):
            self._agent.remove_remote_agent(boot)

    def _pool_list(self, agent: str, kind: MemoryKind, device: int, address: int, pages: int) -> Any:
        geometry = self._memory.geometry
        return self._strided(agent, kind, device, address, geometry.layer_page_bytes, geometry.layers * pages)

    def _rows_list(self, agent: str, address: int, rows: int) -> Any:
        return self._strided(agent, "DRAM", 0, address, ROW_BYTES, rows)

    def _strided(self, agent: str, kind: MemoryKind, device: int, address: int, size: int, count: int) -> Any:
        """A list of `count` dense blocks of `size` bytes, by index."""
        strided = np.array([[address, size, device, size, count]], np.uint64)
        return self._agent.prep_xfer_dlist(agent, strided, kind)

    def _is_done(self, state: str) -> bool:
        if state == "ERR":
            raise TransportError("NIXL reports an error without a class")
        return state == "DONE"

    def _try_release(self, xfer: Any) -> None:
        try:
            self._agent.release_xfer_handle(xfer)
        except self._errors:
            self._unreleased.append(xfer)  # still active; tried again with the next progress

    @contextlib.contextmanager
    def _translated(self, boot: str) -> Iterator[None]:
        try:
            yield
        except self._disconnected as error:
            raise PeerLost(f"decode worker {boot} disconnected ({error})") from error
        except self._errors as error:
            raise TransportError(f"{type(error).__name__} towards decode worker {boot}: {error}") from error

    @contextlib.contextmanager
    def _logged(self, name: str, **fields: Any) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            event(log, name, logging.WARNING, error=f"{type(error).__name__}: {error}", **fields)


class NixlManager(TransferManager):
    def __init__(self, boot: str, memory: KVMemory, rows: int, post_bytes: int, digest: bool = False) -> None:
        destination_rows, source_rows = Rows(rows), Rows(rows)
        transport = NixlTransport(boot, memory, destination_rows, source_rows)
        super().__init__(boot, memory, destination_rows, source_rows, transport, post_bytes, digest)


def load_nixl() -> ModuleType:
    """The package of whichever NIXL wheel is installed, set up as kvrelay needs it unless the user says
    otherwise."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("UCX_TCP_CONN_NB", "y")  # a peer that cannot be reached must not hold up the others
    for wheel in WHEELS:
        if importlib.util.find_spec(wheel):
            return importlib.import_module(wheel)
    raise RuntimeError("NIXL is not installed: pip install nixl-cu13 (it also serves machines without a GPU)")


def new_agent(api: ModuleType, name: str) -> Any:
    """An agent with UCX, for one thread. Raises RuntimeError when UCX does not start."""
    sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE
    agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[], sync_mode=sync))
    try:
        # With error handling "none" the death of a peer would never be reported.
        agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
    except error_classes(api) as error:
        raise RuntimeError(
            f"NIXL cannot start UCX ({error}). UCX_TLS, if set, must include tcp; unset it to be sure."
        ) from error
    return agent


def bind_device(index: int) -> None:
    """Make the GPU's context that of this thread, which UCX needs to copy; a first call that waits does."""
    import torch

    torch.cuda.set_device(index)
    torch.cuda.synchronize()


def error_classes(api: ModuleType) -> tuple[type[Exception], ...]:
    """NIXL's exceptions have no base class of their own."""
    found = vars(api._bindings).items()
    return tuple(cls for name, cls in found if name.startswith("nixl") and name.endswith("Error"))
