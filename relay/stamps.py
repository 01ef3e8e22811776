"""When the owner of a leg did what: kept in its memory, and told with a call that it makes anyway."""

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from relay.server_clock import ServerClock
from relay.stretches import Stretch


class Stamps(NamedTuple):
    """Of one claim, in ms of the server since the epoch. `published`: when a prefill worker had the pages to
    write to."""

    cached_tokens: int = 0
    published: float | None = None
    chunks: tuple[Stretch, ...] = ()
    sends: tuple[Stretch, ...] = ()

    @classmethod
    def told(
        cls,
        clock: ServerClock,
        cached_tokens: int,
        chunks: Iterable[Stretch],
        sends: Iterable[Stretch] = (),
        published_s: float | None = None,
    ) -> "Stamps":
        """From what this process has noted in monotonic seconds."""

        def moved(stretches: Iterable[Stretch]) -> tuple[Stretch, ...]:
            return tuple(s._replace(start=clock.ms(s.start), end=clock.ms(s.end)) for s in stretches)

        published = None if published_s is None else clock.ms(published_s)
        return cls(cached_tokens, published, moved(chunks), moved(sends))

    @property
    def prefill(self) -> tuple[float, float] | None:
        """When the first chunk began and the last one ended."""
        return (self.chunks[0].start, self.chunks[-1].end) if self.chunks else None

    def pack(self) -> str:
        """As text with few digits: moments are relative to the first chunk."""
        base = self.chunks[0].start if self.chunks else self.published or 0.0

        def short(stretches: Iterable[Stretch]) -> list[list[float]]:
            return [[round(s.start - base, 3), round(s.end - base, 3), *s[2:]] for s in stretches]

        published = None if self.published is None else round(self.published - base, 3)
        whole = [round(base, 3), self.cached_tokens, published, short(self.chunks), short(self.sends)]
        return json.dumps(whole, separators=(",", ":"))

    @classmethod
    def unpack(cls, text: str | bytes) -> "Stamps":
        base, cached_tokens, published, chunks, sends = json.loads(text)

        def whole(stretches: list[list[Any]]) -> tuple[Stretch, ...]:
            return tuple(Stretch(base + start, base + end, *rest) for start, end, *rest in stretches)

        return cls(
            cached_tokens, None if published is None else base + published, whole(chunks), whole(sends)
        )
