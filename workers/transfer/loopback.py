"""KV between managers of one process by memcpy, under the rules of the real thing. For tests."""

import ctypes
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from workers.transfer.manager import TransferManager
from workers.transfer.memory import KVMemory
from workers.transfer.metadata import ROW_BYTES
from workers.transfer.peer import Peer
from workers.transfer.rows import Rows
from workers.transfer.runs import IndexArray
from workers.transfer.transport import Handle, PeerLost, Table, Transport, TransportError


@dataclass(frozen=True, slots=True)
class Copy:
    """(to, from) address of each piece."""

    boot: str
    pieces: list[tuple[int, int]]
    size_bytes: int


class LoopbackTransport(Transport):
    """Peers are reached through `living`, the boots of this process: one that stopped is lost."""

    name = "loopback"
    living: ClassVar[set[str]] = set()

    def __init__(self, boot: str, memory: KVMemory, source_rows: Rows) -> None:
        self._boot = boot
        self._memory = memory
        self._source_rows = source_rows
        self._peers: dict[str, Peer] = {}
        self.living.add(boot)

    @property
    def contact(self) -> bytes:
        return b""

    def connect(self, peer: Peer) -> None:
        self._reach(peer.boot)
        self._peers[peer.boot] = peer

    def greet(self, boot: str) -> None:
        pass

    def make(self, boot: str, table: Table, local: IndexArray, remote: IndexArray) -> Handle:
        peer = self._peers.get(boot)
        if peer is None:
            raise TransportError(f"no connection to decode worker {boot}")
        here, there, size, local_count, remote_count = self._layout(table, peer)
        if local.min() < 0 or local.max() >= local_count or remote.min() < 0 or remote.max() >= remote_count:
            raise TransportError(f"an index lies outside of the {table.value} of decode worker {boot}")
        targets, sources = there + remote.astype(np.int64) * size, here + local.astype(np.int64) * size
        return Copy(boot, list(zip(targets.tolist(), sources.tolist(), strict=True)), size)

    def post(self, handle: Copy) -> bool:
        self._reach(handle.boot)
        for to, source in handle.pieces:
            ctypes.memmove(to, source, handle.size_bytes)
        return True

    def check(self, handle: Copy) -> bool:
        return True

    def release(self, handle: Copy) -> None:
        pass

    def progress(self) -> None:
        pass

    def forget(self, boot: str) -> None:
        self._peers.pop(boot, None)

    def close(self) -> None:
        self.living.discard(self._boot)

    def _layout(self, table: Table, peer: Peer) -> tuple[int, int, int, int, int]:
        """Address here and there, bytes, count here and there."""
        if table is Table.ROWS:
            rows = self._source_rows
            return rows.address, peer.rows_address, ROW_BYTES, rows.count, peer.rows
        memory, geometry = self._memory, self._memory.geometry
        size, blocks_there = geometry.layer_page_bytes, geometry.layers * peer.pages
        return memory.address, peer.pool_address, size, memory.blocks, blocks_there

    def _reach(self, boot: str) -> None:
        if boot not in self.living:
            raise PeerLost(f"decode worker {boot} is gone")


class LoopbackManager(TransferManager):
    def __init__(self, boot: str, memory: KVMemory, rows: int, post_bytes: int, digest: bool = False) -> None:
        destination_rows, source_rows = Rows(rows), Rows(rows)
        transport = LoopbackTransport(boot, memory, source_rows)
        super().__init__(boot, memory, destination_rows, source_rows, transport, post_bytes, digest)
