"""A table of metadata rows in host memory."""

import numpy as np

from workers.transfer.base import RowsExhausted
from workers.transfer.metadata import POISON, ROW_BYTES


class Rows:
    """`count` rows of `ROW_BYTES` bytes, each free or taken. One thread takes and gives back."""

    def __init__(self, count: int) -> None:
        self._bytes = np.full((count, ROW_BYTES), 0xFF, np.uint8)
        self._free = list(range(count))[::-1]

    @property
    def count(self) -> int:
        return len(self._bytes)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def address(self) -> int:
        return self._bytes.ctypes.data

    @property
    def size_bytes(self) -> int:
        return self._bytes.nbytes

    def take(self) -> int:
        """A free row, poisoned. Raises RowsExhausted."""
        if not self._free:
            raise RowsExhausted(f"all {self.count} metadata rows are taken or quarantined; hand the leg back")
        row = self._free.pop()
        self.write(row, POISON)
        return row

    def give_back(self, row: int) -> None:
        assert row not in self._free, f"row {row} is free already"
        self._free.append(row)

    def read(self, row: int) -> bytes:
        return bytes(self._bytes[row])

    def write(self, row: int, data: bytes) -> None:
        self._bytes[row] = np.frombuffer(data, np.uint8)
