"""The decode leg: claim → reserve → publish → seal → PREBUILT → steps, and every way in which it may end.

Of the pages of its prompt, those in the prefix cache are held as they are; only the others are published.

A unified worker runs the same legs with another first step: it prefills into its own pool. So does a fork,
another sample of a prompt whose KV is here: it finds all but the last page of it in the prefix cache.
"""

import logging
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from relay.answers import Forked, Kept, Moved, RoomState
from relay.log import event as log_event
from relay.mailbox import Ended, Mail, Ready, Settled
from relay.request import Claimed, Hold, Leg, Why
from relay.worker_card import Incarnation, WorkerCard
from workers.doorbell import TaskHandle
from workers.engine.messages import (
    Admitted,
    Drop,
    Failed,
    LegEvent,
    Prebuilt,
    Prefill,
    Prefilled,
    Refused,
    Reserve,
    Reserved,
    Retracted,
)
from workers.engine.policy import fork_tokens
from workers.legs import Desk, Legs, is_calm, work_of
from workers.meters import Meters
from workers.output import Close, Closed, Finished, Lost, Open, Outcome, OutputThread
from workers.proofs import Proofs
from workers.quarantine import Unproven
from workers.transfer.base import KVReceiver, RowsExhausted, Seal, seal_nonce

log = logging.getLogger(__name__)


class Phase(Enum):
    RESERVING = "reserving"
    PUBLISHED = "published"  # from here on a peer may write, until the seal
    RUNNING = "running"
    CLOSING = "closing"  # retracted or handed back: what was produced is still being emitted


@dataclass(slots=True, eq=False)
class DecodeLeg:
    claimed: Claimed
    task: TaskHandle
    phase: Phase = Phase.RESERVING
    pages: tuple[int, ...] = ()  # that a peer writes
    first_page: int = 0  # of them; those before were here
    receiver: KVReceiver | None = None
    writer: Incarnation | None = None
    why: Why | None = None  # while closing
    leaving: bool = False  # a call that gives it back or fails it is on its way

    @property
    def key(self) -> str:
        return self.claimed.hold.nonce


class DecodeLegs(Legs):
    takes = Leg.DECODE

    def __init__(self, desk: Desk, output: OutputThread, meters: Meters) -> None:
        self._desk = desk
        self._output = output
        self._proofs = Proofs(desk, meters)
        self._legs: dict[str, DecodeLeg] = {}

    # ---- the way of a leg that goes well

    def start(self, claimed: Claimed, task: TaskHandle) -> None:
        leg = DecodeLeg(claimed, task)
        self._legs[leg.key] = leg
        assert claimed.prefill_boot is not None
        writer = self._desk.peer(claimed.prefill_boot)
        if writer is None:  # without knowing the writer, its death could never be proven
            self._give_back(leg, Why.PEER)
            return
        leg.writer = writer.incarnation
        self._desk.tell(Reserve(work_of(claimed)))

    def on_engine(self, event: LegEvent) -> None:
        leg = self._legs.get(event.key)
        match event:
            case Reserved() if leg is not None and leg.phase is Phase.RESERVING and not leg.leaving:
                leg.pages, leg.first_page = event.pages, event.first_page
                self._publish(leg)
            case Refused() if leg is not None:
                self._give_back(leg, Why.PRESSURE)
            case Retracted() if leg is not None and leg.phase is Phase.RUNNING:
                self._close(leg, Why.RETRACT)
            case Failed() if leg is not None:
                self._fail(leg, event.code, event.reason)
            case Prefilled() if leg is not None and leg.phase is Phase.RUNNING:
                self._claim_forks(leg)
            case Reserved() | Refused() | Retracted() | Failed() | Admitted() | Prefilled():
                pass  # of a leg that is gone; its Drop is on the way
            case _:
                raise AssertionError(f"not an event of a decode worker: {event}")

    def _publish(self, leg: DecodeLeg) -> None:
        claimed = leg.claimed
        assert leg.writer is not None
        try:
            leg.receiver = self._desk.manager.receiver(claimed.room, leg.writer.far)
        except RowsExhausted:
            self._give_back(leg, Why.PRESSURE)
            return
        self._announce(leg, leg.receiver.row)

    def _announce(self, leg: DecodeLeg, row: int) -> None:
        hold, room, pages, first_page = leg.claimed.hold, leg.claimed.room, leg.pages, leg.first_page

        def publish() -> Moved | None:
            if not self._has(leg):
                return None
            if leg.phase is Phase.RESERVING:  # a repeat may come after the seal
                leg.phase = Phase.PUBLISHED  # before the call: its reply may be lost while its mail is not
            return self._desk.rooms.publish(hold, room, pages, row, first_page)

        def then(reply: Moved | None) -> None:
            if reply is None or not reply.ok:
                self._lose(leg, "lost")

        self._desk.call(publish, then)

    def on_mail(self, mail: Mail) -> None:
        match mail:
            case Ready():
                leg = next((leg for leg in self._legs.values() if leg.claimed.room == mail.room), None)
                if leg is not None:
                    self._prebuild(leg)
            case Ended():
                leg = self._legs.get(mail.nonce)
                if leg is not None:
                    self._lose(leg, mail.why)
            case Settled():
                self._proofs.settled(mail.room)
            case _:
                raise AssertionError(f"not a mail for a decode worker: {mail}")

    def _prebuild(self, leg: DecodeLeg) -> None:
        if leg.phase is not Phase.PUBLISHED or leg.leaving:
            return
        assert leg.receiver is not None
        seal = leg.receiver.read()
        problem = seal_problem(seal, leg, leg.receiver)
        if seal is None or problem:
            log_event(
                log,
                "seal_mismatch",
                logging.ERROR,
                **leg.claimed.logged,
                room=leg.claimed.room,
                problem=problem,
            )
            self._give_back(leg, Why.ERROR)
            return
        leg.receiver.release(quarantine=False)
        leg.phase = Phase.RUNNING
        self._output.put(Open(leg.key, leg.claimed))
        self._desk.tell(Prebuilt(leg.key, seal.first))
        log_event(log, "prebuilt", **leg.claimed.logged, room=leg.claimed.room, tokens=seal.tokens)
        self._claim_forks(leg)

    # ---- other samples of its prompt

    def _claim_forks(self, leg: DecodeLeg) -> None:
        """The KV of the prompt is in this pool: as many of those that wait for it as there is room for begin
        here, and the others are told to go."""
        claimed, settings = leg.claimed, self._desk.settings
        if not claimed.forks:
            return
        tokens = fork_tokens(
            len(claimed.prompt_ids), claimed.params.max_tokens, settings.reserve_tokens, settings.page_size
        )
        nonces = [secrets.token_hex(16) for _ in range(min(claimed.forks, self._desk.room_for(tokens)))]

        def then(forked: Forked | None) -> None:
            for fork in forked.claimed if forked is not None else ():
                request_id = fork.hold.request_id
                log_event(log, "forked", **fork.logged, leader=claimed.hold.request_id)
                self._run(fork, self._desk.fork(leg.task, request_id))

        boot, lease_ms = self._desk.boot, settings.lease_ms
        self._desk.call(lambda: self._desk.rooms.claim_forks(claimed.hold, boot, lease_ms, nonces), then)

    def _run(self, claimed: Claimed, task: TaskHandle) -> None:
        """Prompt and all tokens are computed here."""
        leg = DecodeLeg(claimed, task, phase=Phase.RUNNING)
        self._legs[leg.key] = leg
        self._output.put(Open(leg.key, claimed))
        self._desk.tell(Prefill(work_of(claimed), relay=False))

    # ---- how it ends

    def on_outcome(self, outcome: Outcome) -> None:
        leg = self._legs.get(outcome.key)
        if leg is None:
            return
        match outcome:
            case Finished():
                self._remove(leg)
                self._desk.done(leg.task, outcome.reason)
                for bell in outcome.rings:
                    self._desk.ring(bell)
                log_event(log, "finished", **leg.claimed.logged, reason=outcome.reason)
            case Lost(error=None):
                self._lose(leg, "lost")
            case Lost():
                self._give_back(leg, Why.ERROR)
            case Closed():
                assert leg.why is not None
                self._give_back(leg, leg.why)

    # ---- the ways in which a leg ends early

    def _close(self, leg: DecodeLeg, why: Why) -> None:
        """Stop producing, emit what was produced, then give the leg back: what was computed is not lost."""
        leg.phase, leg.why = Phase.CLOSING, why
        self._desk.tell(Drop(leg.key))
        self._output.put(Close(leg.key))

    def _give_back(self, leg: DecodeLeg, why: Why) -> None:
        if leg.leaving:
            return
        leg.leaving = True
        hold = leg.claimed.hold

        def then(released: Moved | None) -> None:
            self._lose(leg, why.value if released is not None and released.ok else "lost")

        self._desk.call(lambda: self._desk.rooms.release(hold, why), then)

    def _fail(self, leg: DecodeLeg, code: str, message: str) -> None:
        if leg.leaving:
            return
        leg.leaving = True
        hold = leg.claimed.hold
        self._desk.call(
            lambda: self._desk.rooms.fail(hold, code, message), lambda _: self._lose(leg, message)
        )

    def on_lost(self, hold: Hold, why: str) -> None:
        leg = self._legs.get(hold.nonce)
        if leg is not None:
            self._lose(leg, why)

    def _lose(self, leg: DecodeLeg, why: str) -> None:
        if not self._has(leg):
            return
        self._remove(leg)
        log_event(
            log, "decode_lost", **leg.claimed.logged, room=leg.claimed.room, phase=leg.phase.value, why=why
        )
        if is_calm(why):
            self._desk.done(leg.task, why)
        else:
            self._desk.failed(leg.task, why)

    def _has(self, leg: DecodeLeg) -> bool:
        return self._legs.get(leg.key) is leg

    def _remove(self, leg: DecodeLeg) -> None:
        """The one release of a decode leg: pages, row, output, entry."""
        del self._legs[leg.key]
        written = leg.phase is Phase.PUBLISHED
        if leg.receiver is not None and leg.phase in {Phase.RESERVING, Phase.PUBLISHED}:
            leg.receiver.release(quarantine=written)
        if written:
            assert leg.writer is not None
            self._proofs.need(leg.claimed.room, leg.writer, len(leg.pages))
        self._desk.tell(Drop(leg.key, quarantine=leg.claimed.room if written else None))
        if leg.phase in {Phase.RUNNING, Phase.CLOSING}:
            self._output.put(Close(leg.key))

    def hand_back(self) -> None:
        for leg in list(self._legs.values()):
            if leg.phase is Phase.RUNNING:
                self._close(leg, Why.DRAIN)
            elif leg.phase is not Phase.CLOSING:
                self._give_back(leg, Why.DRAIN)

    # ---- what others ask

    def tick(self, now: float) -> None:
        self._proofs.ask(now)

    def pinned_pages(self) -> int:
        return sum(len(leg.pages) for leg in self._legs.values() if leg.phase is Phase.PUBLISHED)

    def unproven(self) -> Collection[Unproven]:
        return self._proofs.unproven

    def full(self) -> bool:
        """Every metadata row is taken, or would be."""
        receiving = sum(leg.phase in {Phase.RESERVING, Phase.PUBLISHED} for leg in self._legs.values())
        return receiving + len(self._proofs) >= self._desk.settings.max_running

    def on_peer(self, peer: WorkerCard) -> None:
        if self.takes is Leg.DECODE and peer.role == "prefill":
            self._desk.manager.be_greeted()

    def on_renewed(self, kept: Kept) -> None:
        leg = self._legs.get(kept.hold.nonce)
        if leg is None or leg.phase is not Phase.PUBLISHED or leg.leaving:
            return
        if kept.room_state is RoomState.SEALED:
            self._prebuild(leg)
        elif kept.room_state is RoomState.OPEN:  # the server lost its last moments
            assert leg.receiver is not None
            self._announce(leg, leg.receiver.row)

    def holds(self) -> list[Hold]:
        return [leg.claimed.hold for leg in self._legs.values()]

    def request_of(self, task: TaskHandle) -> str | None:
        return next((leg.claimed.hold.request_id for leg in self._legs.values() if leg.task is task), None)

    def settled(self) -> bool:
        return not self._legs


class UnifiedLegs(DecodeLegs):
    takes = Leg.BOTH

    def start(self, claimed: Claimed, task: TaskHandle) -> None:
        self._run(claimed, task)


def seal_problem(seal: Seal | None, leg: DecodeLeg, receiver: KVReceiver) -> str | None:
    """Why this row does not seal this leg's pages, or None when it does."""
    claimed = leg.claimed
    if seal is None:
        return "the row is not written"
    expected = (
        claimed.room,
        seal_nonce(claimed.hold.nonce),
        len(claimed.emitted),
        len(claimed.tokens),
        leg.first_page + len(leg.pages),
    )
    found = (seal.room, seal.nonce, seal.position, seal.tokens, seal.pages)
    if found != expected:
        return f"(room, nonce, position, tokens, pages) is {found}, expected {expected}"
    # A decode worker that died before it published added one, while the prefill leg and its room went on.
    if seal.attempt > claimed.attempt:
        return f"attempt {seal.attempt} has not begun: this is {claimed.attempt}"
    if not receiver.verify(seal, leg.pages):
        return "the digest of the pages differs"
    return None
