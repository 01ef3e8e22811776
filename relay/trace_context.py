"""Which trace a request belongs to: W3C Trace Context, from the client's call through every attempt."""

import re
import secrets
from typing import NamedTuple

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MOST_STATE = 512  # characters that must be carried on
_NOBODY = 16 * "0"


class TraceContext(NamedTuple):
    """`parent_id` is the client's span, or nobody's. `sampled`: its spans are to be exported."""

    trace_id: str
    parent_id: str = _NOBODY
    sampled: bool = False
    state: str = ""

    @classmethod
    def new(cls) -> "TraceContext":
        return cls(secrets.token_hex(16))

    @classmethod
    def received(cls, traceparent: str, tracestate: str = "") -> "TraceContext | None":
        """What a client's headers say; None if that is no trace."""
        found = _TRACEPARENT.fullmatch(traceparent.strip())
        if found is None:
            return None
        version, trace_id, parent_id, flags, more = found.groups()
        if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(parent_id, 16):
            return None
        state = tracestate.strip() if len(tracestate) <= _MOST_STATE and tracestate.isprintable() else ""
        return cls(trace_id, parent_id, bool(int(flags, 16) & 1), state)

    @property
    def has_parent(self) -> bool:
        return self.parent_id != _NOBODY

    def pack(self) -> str:
        """As the record keeps it: traceparent, and behind a space tracestate."""
        return f"00-{self.trace_id}-{self.parent_id}-{int(self.sampled):02x} {self.state}"

    @classmethod
    def unpack(cls, text: str) -> "TraceContext":
        traceparent, _, state = text.partition(" ")
        _, trace_id, parent_id, flags = traceparent.split("-")
        return cls(trace_id, parent_id, flags == "01", state)
