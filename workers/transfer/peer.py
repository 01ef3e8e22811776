"""What a manager publishes as `agent_metadata`, so that a peer can write into its pool."""

import json
import struct
from typing import NamedTuple

from relay.geometry import GeometryMismatch
from workers.transfer.memory import KVMemory, MemoryKind
from workers.transfer.metadata import VERSION as ROW_VERSION
from workers.transfer.rows import Rows

MAGIC = b"KVR1"
SAME_VERSION = "run one version of kvrelay on both sides"


class Peer(NamedTuple):
    """Layout of a peer's pool and rows as plain numbers, and what its transport needs to be reached."""

    boot: str
    memory: MemoryKind
    device: int
    pool_address: int
    pages: int
    rows_address: int
    rows: int
    row_version: int
    transport: str
    contact: bytes

    @classmethod
    def here(cls, boot: str, memory: KVMemory, rows: Rows, transport: str, contact: bytes) -> "Peer":
        pool = (memory.kind, memory.device, memory.address, memory.geometry.pages)
        return cls(boot, *pool, rows.address, rows.count, ROW_VERSION, transport, contact)

    def pack(self) -> bytes:
        """Magic, length of the JSON header, header, the transport's own bytes."""
        header = json.dumps(self[:-1]).encode()
        return MAGIC + struct.pack("<I", len(header)) + header + self.contact

    @classmethod
    def unpack(cls, data: bytes) -> "Peer":
        """Raises GeometryMismatch when the peer speaks another version: no KV may travel."""
        try:
            if data[:4] != MAGIC:
                raise ValueError(f"it begins with {data[:4]!r}, not {MAGIC!r}")
            (length,) = struct.unpack_from("<I", data, 4)
            peer = cls._make([*json.loads(data[8 : 8 + length]), data[8 + length :]])
        except (ValueError, TypeError, struct.error) as error:
            raise GeometryMismatch(f"unreadable agent metadata ({error}): {SAME_VERSION}") from error
        if peer.row_version != ROW_VERSION:
            raise GeometryMismatch(
                f"metadata rows of version {ROW_VERSION} here, {peer.row_version} there: {SAME_VERSION}"
            )
        return peer
