"""What must be equal on both sides before KV may travel between two workers."""

import json
from typing import NamedTuple


class GeometryMismatch(ValueError):
    """Two workers of one model name hold KV of different shapes; no KV may travel between them."""


class Geometry(NamedTuple):
    """Shape of one worker's KV pool. Everything but `pages` must be equal on both sides."""

    fingerprint: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    pages: int

    @property
    def layer_page_bytes(self) -> int:
        """K and V of one page in one layer."""
        item_bytes = {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]
        return 2 * self.page_size * self.kv_heads * self.head_dim * item_bytes

    @property
    def page_bytes(self) -> int:
        return self.layers * self.layer_page_bytes

    def check(self, peer: "Geometry") -> None:
        """Raise GeometryMismatch, naming every field that differs."""
        wrong = [
            f"{name} {mine} here, {theirs} there"
            for name, mine, theirs in zip(self._fields, self, peer)
            if name != "pages" and mine != theirs
        ]
        if wrong:
            raise GeometryMismatch(
                f"KV of the two workers differs: {'; '.join(wrong)}. "
                "Start both with the same MODEL, DTYPE and PAGE_SIZE."
            )

    def to_json(self) -> str:
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Geometry":
        return cls(*json.loads(text))
