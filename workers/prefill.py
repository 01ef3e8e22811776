"""The prefill leg: claim → chunks → sends → seal → KV-ready, and every way in which it may end."""

import logging
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field

from relay import answers
from relay.answers import Kept, Moved, PublishedPages, RoomState
from relay.geometry import GeometryMismatch
from relay.log import event as log_event
from relay.mailbox import Ask, Ended, Mail, Published
from relay.request import Claimed, Hold, Leg, Why
from relay.stamps import Stamps
from relay.stretches import Stretch, Stretches
from relay.worker_card import WorkerCard
from workers.doorbell import TaskHandle
from workers.engine.messages import Admitted, Chunked, Drop, Failed, LegEvent, Prefill, Prefilled
from workers.legs import Desk, Legs, ignore, is_calm, work_of
from workers.quarantine import Unproven
from workers.senders import Senders
from workers.transfer.base import (
    Destination,
    KVSender,
    RoomEvent,
    Seal,
    SendFailed,
    Sent,
    Settled,
    seal_nonce,
)

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PrefillLeg:
    claimed: Claimed
    task: TaskHandle
    sender: KVSender | None = None  # from admission on
    pages: int = 0
    cached_tokens: int = 0
    destination: Destination | None = None  # once published
    published_at: float | None = None  # when this worker heard of it, monotonic
    peer: WorkerCard | None = None  # from bootstrap on
    chunks: Stretches = field(default_factory=Stretches)  # while it is being computed
    prefilled: Prefilled | None = None
    sends: tuple[Stretch, ...] = ()  # told with the end of the transfer
    leaving: bool = False  # a call that gives it back or fails it is on its way
    over_at: float | None = None  # not ours any more since then (monotonic): its pages wait for Settled

    @property
    def key(self) -> str:
        return self.claimed.hold.nonce

    @property
    def over(self) -> bool:
        return self.over_at is not None

    @property
    def stamps(self) -> Stamps:
        """What was done for this leg so far."""
        chunks = self.prefilled.chunks if self.prefilled is not None else self.chunks.all
        return Stamps.told(self.claimed.clock, self.cached_tokens, chunks, self.sends, self.published_at)

    @property
    def unsent(self) -> bool:
        """Computed, and no decode worker has taken it yet."""
        return self.prefilled is not None and self.destination is None and not self.over


class PrefillLegs(Legs):
    takes = Leg.PREFILL

    def __init__(self, desk: Desk, senders: Senders) -> None:
        self._desk = desk
        self._senders = senders
        self._legs: dict[str, PrefillLeg] = {}  # by key, owned or settling
        self._rooms: dict[int, PrefillLeg] = {}

    # ---- the way of a leg that goes well

    def start(self, claimed: Claimed, task: TaskHandle) -> None:
        leg = PrefillLeg(claimed, task)
        self._legs[leg.key] = leg
        self._rooms[claimed.room] = leg
        self._senders.expect(leg.key, claimed.room)
        self._desk.tell(Prefill(work_of(claimed), relay=True))

    def on_engine(self, event: LegEvent) -> None:
        leg = self._legs.get(event.key)
        match event:
            case Admitted():
                if leg is None:  # lost while it waited for admission: its Drop is on the way
                    self._senders.forget(event.key)
                    return
                leg.sender, leg.pages, leg.cached_tokens = (
                    self._senders.opened(event.key),
                    len(event.pages),
                    event.cached_tokens,
                )
                self._bootstrap(leg)
            case Chunked():
                if leg is not None:
                    leg.chunks.add(event.chunk)
            case Prefilled():
                if leg is None or leg.over:
                    return
                leg.prefilled = event
                self._seal(leg)
            case Failed():
                if leg is not None and not leg.over:
                    self._fail(leg, event.code, event.reason)
            case _:
                raise AssertionError(f"not an event of a prefill worker: {event}")

    def on_mail(self, mail: Mail) -> None:
        match mail:
            case Published():
                self._published(mail.room, mail)
            case Ended():
                leg = self._legs.get(mail.nonce)
                if leg is not None:
                    self._lose(leg, mail.why)
            case Ask():
                # This worker posts only to rooms it knows: of any other nothing is in flight.
                if mail.room not in self._rooms:
                    self._desk.call(lambda: self._desk.rooms.settle(mail.room, mail.boot), ignore)
            case _:
                raise AssertionError(f"not a mail for a prefill worker: {mail}")

    def on_peer(self, peer: WorkerCard) -> None:
        if peer.role == "decode":
            with suppress(GeometryMismatch):  # the first room tells
                self._desk.manager.greet_peer(peer.agent_metadata, peer.geometry)

    def on_renewed(self, kept: Kept) -> None:
        leg = self._legs.get(kept.hold.nonce)
        if leg is None or leg.destination is not None or kept.room_state is not RoomState.PUBLISHED:
            return
        room = leg.claimed.room

        def then(pages: PublishedPages | None) -> None:
            if pages is not None:  # its mail did not come
                self._published(room, pages)

        self._desk.call(lambda: self._desk.rooms.published(room), then)

    def _published(self, room: int, where: Published | PublishedPages) -> None:
        leg = self._rooms.get(room)
        if leg is None or leg.over or leg.leaving or leg.destination is not None:
            return
        leg.destination = Destination(
            where.peer_boot, where.pages, where.row, seal_nonce(where.nonce), where.first_page
        )
        leg.published_at = time.monotonic()
        self._bootstrap(leg)

    def _bootstrap(self, leg: PrefillLeg) -> None:
        if leg.sender is None or leg.destination is None:
            return
        peer = leg.peer = self._desk.peer(leg.destination.boot)
        if peer is None:
            self._give_back(leg, Why.PEER)
            return
        try:
            leg.sender.bootstrap(leg.destination, peer.agent_metadata, peer.geometry)
        except GeometryMismatch as mismatch:
            self._fail(leg, "geometry_mismatch", str(mismatch))
            return
        log_event(log, "bootstrapped", **leg.claimed.logged, room=leg.claimed.room, peer=peer.name)
        self._seal(leg)

    def _seal(self, leg: PrefillLeg) -> None:
        if leg.prefilled is None or leg.destination is None or leg.sender is None:
            return
        claimed = leg.claimed
        leg.sender.seal(
            Seal(
                room=claimed.room,
                attempt=claimed.attempt,
                nonce=leg.destination.nonce,
                position=len(claimed.emitted),
                tokens=len(claimed.tokens),
                pages=leg.pages,
                first=leg.prefilled.first,
                cached_tokens=leg.cached_tokens,
            )
        )

    def on_transfer(self, event: RoomEvent) -> None:
        leg = self._rooms.get(event.room)
        if leg is None:
            return
        match event:
            case Sent() if not leg.over:
                self._ready(leg, event)
            case SendFailed():
                leg.sends = event.sends
                log_event(
                    log,
                    "send_failed",
                    logging.WARNING,
                    **leg.claimed.logged,
                    room=event.room,
                    error=event.error,
                )
                self._give_back(leg, Why.PEER)
            case Settled() | Sent():
                self._forget(leg, tell_reader=True)

    def _ready(self, leg: PrefillLeg, sent: Sent) -> None:
        assert leg.prefilled is not None
        hold, room = leg.claimed.hold, leg.claimed.room
        leg.sends = sent.sends
        computed = answers.Prefilled(leg.stamps, leg.prefilled.scores)
        transfer = answers.Transfer(sent.exposed_us, sent.bytes, sent.descriptors, sent.spared_bytes)

        def ready() -> Moved:
            return self._desk.rooms.kv_ready(hold, room, computed, transfer)

        def then(reply: Moved | None) -> None:
            ok = reply is not None and reply.ok
            if ok and not leg.over:
                log_event(
                    log,
                    "kv_ready",
                    **leg.claimed.logged,
                    room=room,
                    bytes=sent.bytes,
                    spared_bytes=sent.spared_bytes,
                    exposed_us=sent.exposed_us,
                )
                leg.over_at = time.monotonic()
                self._desk.done(leg.task, f"{len(leg.claimed.tokens)} tokens, {sent.bytes} bytes")
            self._lose(leg, "the room ended before its KV was ready")
            self._forget(leg, tell_reader=not ok)

        self._desk.call(ready, then)

    # ---- the ways in which a leg ends early

    def on_lost(self, hold: Hold, why: str) -> None:
        leg = self._legs.get(hold.nonce)
        if leg is not None:
            self._lose(leg, why)

    def hand_back(self) -> None:
        for leg in list(self._legs.values()):
            self._give_back(leg, Why.DRAIN)

    def make_room(self) -> None:
        """Give the youngest computed leg back that no decode worker took; its pages stay as evictable cache.
        Else a retracted request could wait for pages that wait for a decode worker that waits for it."""
        unsent = [leg for leg in self._legs.values() if leg.unsent and not leg.leaving]
        if unsent:
            self._give_back(max(unsent, key=lambda leg: leg.claimed.submitted_ms), Why.PRESSURE)

    def _give_back(self, leg: PrefillLeg, why: Why) -> None:
        if leg.over or leg.leaving:
            return
        leg.leaving = True
        hold, stamps = leg.claimed.hold, leg.stamps

        def then(released: Moved | None) -> None:
            self._lose(leg, why.value if released is not None and released.ok else "lost")

        self._desk.call(lambda: self._desk.rooms.release(hold, why, stamps), then)

    def _fail(self, leg: PrefillLeg, code: str, message: str) -> None:
        if leg.over or leg.leaving:
            return
        leg.leaving = True
        hold = leg.claimed.hold
        self._desk.call(
            lambda: self._desk.rooms.fail(hold, code, message), lambda _: self._lose(leg, message)
        )

    def _lose(self, leg: PrefillLeg, why: str) -> None:
        """The leg is not ours any more; its pages are ours until nothing of it is in flight."""
        if leg.over:
            return
        leg.over_at = time.monotonic()
        if is_calm(why):
            self._desk.done(leg.task, why)
        else:
            self._desk.failed(leg.task, why)
        log_event(log, "prefill_lost", **leg.claimed.logged, room=leg.claimed.room, why=why)
        if leg.sender is None:
            self._forget(leg, tell_reader=True)
            return
        leg.sender.close()

    def _forget(self, leg: PrefillLeg, tell_reader: bool) -> None:
        """Nothing of this leg is in flight: its pages may be reused here, and the reader's there."""
        if self._legs.pop(leg.key, None) is None:
            return
        self._rooms.pop(leg.claimed.room, None)
        self._senders.forget(leg.key)
        self._desk.tell(Drop(leg.key))
        if tell_reader and leg.destination is not None:
            boot, room = leg.destination.boot, leg.claimed.room
            self._desk.call(lambda: self._desk.rooms.settle(room, boot), ignore)

    # ---- time

    def full(self) -> bool:
        """Enough waits in the engine to keep it busy, or too much is computed and not sent."""
        settings = self._desk.settings
        open_legs = [leg for leg in self._legs.values() if not leg.over]
        uncomputed_tokens = sum(len(leg.claimed.tokens) for leg in open_legs if leg.prefilled is None)
        unsent_tokens = sum(len(leg.claimed.tokens) for leg in open_legs if leg.unsent)
        return (
            uncomputed_tokens >= 2 * settings.chunk_tokens
            or unsent_tokens > settings.unsent_share * self._desk.capacity_tokens
        )

    def tick(self, now: float) -> None:
        for leg in list(self._legs.values()):
            if leg.over and leg.peer is not None and leg.peer.incarnation.proven_dead():
                self._desk.manager.forget_peer(leg.peer.boot)
                self._forget(leg, tell_reader=False)

    def pinned_pages(self) -> int:
        return sum(
            max(0, leg.pages - leg.destination.first_page)
            for leg in self._legs.values()
            if leg.destination is not None
        )

    def unproven(self) -> Collection[Unproven]:
        return [Unproven(leg.pages, leg.over_at) for leg in self._legs.values() if leg.over_at is not None]

    def holds(self) -> list[Hold]:
        return [leg.claimed.hold for leg in self._legs.values() if not leg.over]

    def progress(self) -> dict[str, Stamps]:
        computing = (leg for leg in self._legs.values() if leg.prefilled is None and not leg.over)
        return {leg.key: leg.stamps for leg in computing if leg.chunks.all}

    def request_of(self, task: TaskHandle) -> str | None:
        return next((leg.claimed.hold.request_id for leg in self._legs.values() if leg.task is task), None)

    def settled(self) -> bool:
        return not self._legs
