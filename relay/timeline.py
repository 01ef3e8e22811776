"""A request's way as spans of time, for people: from what Redis noted of it, and what its workers told.

Transitions bear the time of the Redis server. What a worker did is told in that time too (`ServerClock`), and
lies between the claim and the call that told it, so no clock of any host can make a span negative.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from relay.request import Leg, Record
from relay.stamps import Stamps
from relay.stretches import Stretch

GATEWAY = "gateway"


class Entry(NamedTuple):
    """What the server noted: `name` happened at `at_ms`, when the stream had so many tokens."""

    name: str
    at_ms: float
    leg: str
    tokens: int
    detail: str

    @classmethod
    def unpack(cls, text: str | bytes) -> "Entry":
        name, at, leg, tokens, detail = json.loads(text)
        return cls(name, float(at), leg, tokens, detail)


class Span(NamedTuple):
    """`end_ms` None: it goes on. `parent` is a place in the list that it came in. Ms since the epoch."""

    name: str
    process: str
    attempt: int
    start_ms: float
    end_ms: float | None
    parent: int | None
    attributes: dict[str, Any]


class Timeline(NamedTuple):
    """As it was at `now_ms`, server time. `progress`: what was done for a prefill leg that goes on."""

    record: Record
    entries: Sequence[Entry]
    now_ms: float
    progress: Stamps | None = None

    @property
    def arrived_ms(self) -> float:
        """When the client's call came to the gateway."""
        if not self.entries or self.entries[0].name != "submitted":  # an earlier version began it
            return self.record.timings.submitted
        return self.entries[0].at_ms - float(self.entries[0].detail)

    def spans(self) -> list[Span]:
        way, at_ms = _Way(self.arrived_ms), 0.0
        for entry in self.entries:
            at_ms = max(at_ms, entry.at_ms)  # should the server's clock be set back
            way.take(entry._replace(at_ms=at_ms))
        if self.progress is not None:
            way.stamp(self.progress, self.now_ms, over=False)
        return way.spans(self.record)


@dataclass(slots=True)
class _Draft:
    name: str
    process: str
    attempt: int
    start: float
    parent: int | None
    end: float | None = None
    attributes: dict[str, Any] = field(default_factory=dict)


class _Way:
    """Entry by entry; `_open` has the place of each span that goes on, by name."""

    def __init__(self, arrived_ms: float) -> None:
        self.drafts: list[_Draft] = []
        self._arrived_ms = arrived_ms
        self._open: dict[str, int] = {}
        self._worker = {"prefill": "", "decode": ""}
        self._attempt = 1
        self._claimed_ms = 0.0
        self._first_tokens = 0  # in the stream when this attempt's decode leg was claimed

    def take(self, entry: Entry) -> None:
        at = entry.at_ms
        match entry.name:
            case "submitted":
                self._begin("accept", GATEWAY, self._arrived_ms)
                self._finish("accept", at)
            case "waits":
                self._begin("queued", GATEWAY, at, leader=entry.detail)
            case "queued":
                self._queued(entry)
            case "claimed":
                self._claimed(entry)
            case "published":
                self._finish("reserve", at)
                self._finish("bootstrap", at)
                there = {"spared_pages": int(entry.detail)} if entry.detail not in ("", "0") else {}
                self._begin("transfer", self._worker["prefill"], at, peer=self._worker["decode"], **there)
            case "stamps":
                self.stamp(Stamps.unpack(entry.detail), at)
            case "ready":
                self._finish("prefill", at)
                self._finish("transfer", at)
                self._begin("admit", self._worker["decode"], at)
            case "first":
                self._finish("prefill", at)
                self._finish("admit", at)
                if "decode" not in self._open:
                    self._begin("decode", self._worker["decode"], at)
            case "released":
                self._released(entry)
            case "ended":
                self._finish_all(at)

    def spans(self, record: Record) -> list[Span]:
        self._count(record.completion_tokens)
        if record.state.terminal:  # of a very long way the end was not noted
            self._finish_all(record.timings.ended)
        return [
            Span(d.name, d.process, d.attempt, d.start, d.end, d.parent, d.attributes) for d in self.drafts
        ]

    def _count(self, tokens: int) -> None:
        """What this attempt's decode leg has brought, if it has."""
        if (decode := self._last("decode")) is not None:
            self.drafts[decode].attributes["tokens"] = tokens - self._first_tokens

    # What an entry means

    def _queued(self, entry: Entry) -> None:
        self._finish("queued", entry.at_ms)
        parent = self._open.get("bootstrap") if entry.leg == Leg.DECODE else None
        self._begin("queued", GATEWAY, entry.at_ms, parent, leg=entry.leg)

    def _claimed(self, entry: Entry) -> None:
        at, worker = entry.at_ms, entry.detail
        self._finish("queued", at)
        if entry.leg == Leg.DECODE:
            self._worker["decode"] = worker
            self._first_tokens = entry.tokens
            self._begin("reserve", worker, at, self._open.get("bootstrap"))
            return
        self._claimed_ms = at
        self._worker["prefill"] = worker
        if entry.leg == Leg.PREFILL:
            self._begin("bootstrap", worker, at)
        else:
            self._worker["decode"] = worker
            self._first_tokens = entry.tokens
        self._begin("prefill", worker, at)

    def stamp(self, stamps: Stamps, told_ms: float, over: bool = True) -> None:
        """The owner's own account of the prefill leg, which goes on if it is not `over`. A second one changes
        nothing."""
        worker = self._worker["prefill"]

        def moment(at: float) -> float:
            return min(max(at, self._claimed_ms), told_ms)

        if stamps.prefill is not None and (prefill := self._open.pop("prefill", None)) is not None:
            draft, (start, end) = self.drafts[prefill], map(moment, stamps.prefill)
            self._add("wait", worker, draft.start, start)
            draft.start = start
            if over:
                draft.end = end
            else:
                self._open["prefill"] = prefill
            draft.attributes = {"cached_tokens": stamps.cached_tokens}
            for chunk in stamps.chunks:
                self._add(
                    "chunk", worker, moment(chunk.start), moment(chunk.end), prefill, **_of_chunk(chunk)
                )
        if stamps.published is not None and (bootstrap := self._last("bootstrap")) is not None:
            self.drafts[bootstrap].end = moment(stamps.published)
        if stamps.sends and (transfer := self._open.pop("transfer", None)) is not None:
            draft, sends = self.drafts[transfer], stamps.sends
            draft.start, draft.end = moment(sends[0].start), moment(max(send.end for send in sends))
            draft.attributes["bytes"] = sum(send.amount for send in sends if send.last_layer)
            for send in sends:
                name = "send" if send.last_layer else "seal"
                self._add(name, worker, moment(send.start), moment(send.end), transfer, **_of_send(send))

    def _released(self, entry: Entry) -> None:
        at, leg = entry.at_ms, entry.leg
        worker = self._worker[leg]
        if leg == Leg.DECODE and "bootstrap" in self._open:  # prefill goes on, for another decode worker
            self._finish("reserve", at)
        else:
            self._count(entry.tokens)
            self._finish_all(at)
        self._add("released", worker, at, at, leg=leg, why=entry.detail)
        if not self._open:
            self._attempt += 1

    # Spans

    def _begin(
        self, name: str, process: str, at: float, parent: int | None = None, **attributes: Any
    ) -> None:
        self._open[name] = len(self.drafts)
        self.drafts.append(_Draft(name, process, self._attempt, at, parent, attributes=attributes))

    def _finish(self, name: str, at: float) -> None:
        place = self._open.pop(name, None)
        if place is not None:
            self.drafts[place].end = max(self.drafts[place].start, at)

    def _finish_all(self, at: float) -> None:
        for name in list(self._open):
            self._finish(name, at)

    def _add(
        self, name: str, process: str, start: float, end: float, parent: int | None = None, **attributes: Any
    ) -> None:
        self.drafts.append(_Draft(name, process, self._attempt, start, parent, end, attributes))

    def _last(self, name: str) -> int | None:
        """The place of this attempt's latest span of that name."""
        wanted = (name, self._attempt)
        places = range(len(self.drafts) - 1, -1, -1)
        return next((i for i in places if (self.drafts[i].name, self.drafts[i].attempt) == wanted), None)


def _of_chunk(chunk: Stretch) -> dict[str, Any]:
    return {"tokens": chunk.amount} | _joined(chunk)


def _of_send(send: Stretch) -> dict[str, Any]:
    layers = {"layers": f"{send.first_layer}-{send.last_layer - 1}"} if send.last_layer else {}
    return {"bytes": send.amount} | layers | _joined(send)


def _joined(stretch: Stretch) -> dict[str, Any]:
    return {"joined": stretch.joined} if stretch.joined > 1 else {}
