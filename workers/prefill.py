"""The prefill leg: claim → chunks → sends → seal → KV-ready, and every way in which it may end."""

import logging
import time
from dataclasses import dataclass

from relay import answers
from relay.answers import Kept, Moved, PublishedPages, RoomState
from relay.geometry import GeometryMismatch
from relay.log import event as log_event
from relay.mailbox import Ask, Ended, Mail, Published
from relay.request import Claimed, Hold, Leg, Why
from relay.worker_card import WorkerCard
from workers.doorbell import TaskHandle
from workers.engine.messages import Admitted, Drop, Failed, LegEvent, Prefill, Prefilled, Work
from workers.legs import Desk, Legs
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
    peer: WorkerCard | None = None  # from bootstrap on
    prefilled: Prefilled | None = None
    over: str | None = None  # why the leg is no longer ours; its pages wait for Settled

    @property
    def key(self) -> str:
        return self.claimed.hold.nonce

    @property
    def unsent(self) -> bool:
        """Computed, and no decode worker has taken it yet."""
        return self.prefilled is not None and self.destination is None and self.over is None


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
        work = Work(
            leg.key,
            claimed.hold.request_id,
            claimed.prompt_ids,
            claimed.emitted,
            claimed.params,
            claimed.solo,
            claimed.submitted_ms,
        )
        self._desk.tell(Prefill(work, relay=True))

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
            case Prefilled():
                if leg is None or leg.over:
                    return
                leg.prefilled = event
                self._seal(leg)
            case Failed():
                if leg is not None and leg.over is None:
                    self._fail(leg, "unsampleable", event.reason)
            case _:
                raise AssertionError(f"not an event of a prefill worker: {event}")

    def on_mail(self, mail: Mail) -> None:
        match mail:
            case Published():
                self._published(mail.room, mail)
            case Ended():
                leg = self._legs.get(mail.nonce)
                if leg is not None and leg.over is None:
                    self._lose(leg, mail.why)
            case Ask():
                if (
                    mail.room not in self._rooms
                ):  # this worker posts only to rooms it knows: none is in flight here
                    self._desk.call(lambda: self._desk.rooms.settle(mail.room, mail.boot), _ignore)
            case _:
                raise AssertionError(f"not a mail for a prefill worker: {mail}")

    def on_renewed(self, kept: Kept) -> None:
        leg = self._legs.get(kept.hold.nonce)
        if (
            leg is None
            or leg.over
            or leg.destination is not None
            or kept.room_state is not RoomState.PUBLISHED
        ):
            return
        room = leg.claimed.room

        def then(pages: PublishedPages | None) -> None:
            if pages is not None:  # its mail did not come
                self._published(room, pages)

        self._desk.call(lambda: self._desk.rooms.published(room), then)

    def _published(self, room: int, where: Published | PublishedPages) -> None:
        leg = self._rooms.get(room)
        if leg is None or leg.over or leg.destination is not None:
            return
        leg.destination = Destination(where.peer_boot, where.pages, where.row, seal_nonce(where.nonce))
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
        log_event(
            log, "bootstrapped", request=leg.claimed.hold.request_id, room=leg.claimed.room, peer=peer.name
        )
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
            case Sent() if leg.over is None:
                self._ready(leg, event)
            case SendFailed():
                log_event(
                    log,
                    "send_failed",
                    logging.WARNING,
                    request=leg.claimed.hold.request_id,
                    room=event.room,
                    error=event.error,
                )
                if leg.over is None:
                    self._give_back(leg, Why.PEER)
            case Settled() | Sent():
                self._forget(leg, tell_reader=True)

    def _ready(self, leg: PrefillLeg, sent: Sent) -> None:
        assert leg.prefilled is not None
        hold, room, prefilled = leg.claimed.hold, leg.claimed.room, leg.prefilled

        def ready() -> Moved:
            now = time.monotonic()
            computed = answers.Prefilled(
                leg.cached_tokens, (now - prefilled.started) * 1e3, (now - prefilled.ended) * 1e3
            )
            transfer = answers.Transfer(sent.exposed_us, sent.bytes, sent.descriptors)
            return self._desk.rooms.kv_ready(hold, room, computed, transfer)

        def then(reply: Moved) -> None:
            if leg.over is None:
                result = f"{len(leg.claimed.tokens)} tokens, {sent.bytes} bytes" if reply.ok else "lost"
                log_event(
                    log,
                    "kv_ready",
                    request=hold.request_id,
                    room=room,
                    ok=reply.ok,
                    bytes=sent.bytes,
                    exposed_us=sent.exposed_us,
                )
                self._end(leg, result, None if reply.ok else "the room ended before its KV was ready")
            self._forget(leg, tell_reader=not reply.ok)

        self._desk.call(ready, then)

    # ---- the ways in which a leg ends early

    def on_lost(self, hold: Hold, why: str) -> None:
        leg = self._legs.get(hold.nonce)
        if leg is not None and leg.over is None:
            self._lose(leg, why)

    def hand_back(self) -> None:
        for leg in list(self._legs.values()):
            if leg.over is None:
                self._give_back(leg, Why.DRAIN)

    def make_room(self) -> None:
        """Give the youngest computed leg back that no decode worker took; its pages stay as evictable cache.
        Else a retracted request could wait for pages that wait for a decode worker that waits for it."""
        unsent = [leg for leg in self._legs.values() if leg.unsent]
        if unsent:
            self._give_back(max(unsent, key=lambda leg: leg.claimed.submitted_ms), Why.PRESSURE)

    def _give_back(self, leg: PrefillLeg, why: Why) -> None:
        hold = leg.claimed.hold

        def then(released: Moved) -> None:
            self._lose(leg, why.value if released.ok else "lost")

        self._desk.call(lambda: self._desk.rooms.release(hold, why), then)

    def _fail(self, leg: PrefillLeg, code: str, message: str) -> None:
        hold = leg.claimed.hold
        self._desk.call(
            lambda: self._desk.rooms.fail(hold, code, message), lambda _: self._lose(leg, message)
        )

    def _lose(self, leg: PrefillLeg, why: str) -> None:
        """The leg is not ours any more; its pages are ours until nothing of it is in flight."""
        if leg.over is not None:
            return
        self._end(leg, why, None if why in {Why.DRAIN, Why.PRESSURE, "cancelled"} else why)
        log_event(log, "prefill_lost", request=leg.claimed.hold.request_id, room=leg.claimed.room, why=why)
        if leg.sender is None:
            self._forget(leg, tell_reader=True)
            return
        leg.sender.close()

    def _end(self, leg: PrefillLeg, result: str, error: str | None) -> None:
        leg.over = result
        if error is None:
            self._desk.done(leg.task, result)
        else:
            self._desk.failed(leg.task, error)

    def _forget(self, leg: PrefillLeg, tell_reader: bool) -> None:
        """Nothing of this leg is in flight: its pages may be reused here, and the reader's there."""
        if self._legs.pop(leg.key, None) is None:
            return
        self._rooms.pop(leg.claimed.room, None)
        self._senders.forget(leg.key)
        self._desk.tell(Drop(leg.key))
        if tell_reader and leg.destination is not None:
            boot, room = leg.destination.boot, leg.claimed.room
            self._desk.call(lambda: self._desk.rooms.settle(room, boot), _ignore)

    # ---- time

    def full(self) -> bool:
        """Enough waits in the engine to keep it busy, or too much is computed and not sent."""
        settings = self._desk.settings
        open_legs = [leg for leg in self._legs.values() if leg.over is None]
        uncomputed_tokens = sum(len(leg.claimed.tokens) for leg in open_legs if leg.prefilled is None)
        unsent_tokens = sum(len(leg.claimed.tokens) for leg in open_legs if leg.unsent)
        return (
            uncomputed_tokens >= 2 * settings.chunk_tokens
            or unsent_tokens > settings.unsent_share * self._desk.capacity_tokens
        )

    def tick(self, now: float) -> None:
        for leg in list(self._legs.values()):
            if leg.over is not None and leg.peer is not None and leg.peer.incarnation.proven_dead():
                self._desk.manager.forget_peer(leg.peer.boot)
                self._forget(leg, tell_reader=False)

    def holds(self) -> list[Hold]:
        return [leg.claimed.hold for leg in self._legs.values() if leg.over is None]

    def request_of(self, task: TaskHandle) -> str | None:
        return next((leg.claimed.hold.request_id for leg in self._legs.values() if leg.task is task), None)

    def settled(self) -> bool:
        return not self._legs


def _ignore(_: object) -> None:
    """A reply that changes nothing here."""
