"""The truth in Redis, as Python calls it: one method per event of the state tables in docs/architecture.md.

Every method may run twice without harm, since redis-py repeats a call whose answer is late: claims are
recognized by their nonce, tokens by their position, and a repeated transition is either answered again or
stale. All raise one of `redis_client.AWAY` when the server is away, and ProtocolMismatch when another version
of kvrelay has taken over.
"""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from redis.exceptions import OutOfMemoryError

from relay.answers import (
    Backlog,
    Cancelled,
    Claim,
    Emission,
    EmitOutcome,
    Emitted,
    Forked,
    Kept,
    Left,
    Lost,
    Moved,
    Prefilled,
    PublishedPages,
    Reaped,
    Renewed,
    RoomState,
    SubmitOutcome,
    Submitted,
    Transfer,
    Waiting,
)
from relay.commit import GroupCommit
from relay.functions import Functions
from relay.packed import pack_ints, unpack_ints
from relay.prompt_logprobs import PromptLogprobs
from relay.protocol import Protocol
from relay.redis_client import command_client
from relay.request import Hold, Leg, Record, Ring, State, Submission, Why
from relay.stamps import Stamps
from relay.timeline import Entry, Timeline
from relay.wire import (
    pack_card,
    pack_emission,
    pack_held,
    pack_hold,
    pack_load,
    pack_member,
    pairs,
    unpack_card,
    unpack_claim,
    unpack_claimed,
    unpack_milestone,
    unpack_moved,
    unpack_record,
    unpack_rings,
)
from relay.worker_card import Load, WorkerCard

RESULT_TTL_MS = 3_600_000


class Rooms:
    """The requests and rooms of one model. Thread-safe; one per process is enough."""

    def __init__(self, url: str, model: str, result_ttl_ms: int = RESULT_TTL_MS) -> None:
        self.redis = command_client(url)
        self.root = root_key(model)
        self.protocol = Protocol(self.redis, self.root)
        self._functions = Functions(self.redis, self.root, self.protocol)
        self._commits = GroupCommit(self.redis, self.root)
        self._result_ttl_ms = result_ttl_ms

    def close(self) -> None:
        self.redis.close()

    # Gateway

    def submit(self, first: Submission, *others: Submission) -> Submitted:
        """Create the records, prompts and queue entries of a group, and its idempotency key, in one step: all
        or nothing. What concerns the call is read from the first. A fork comes after its leader; the other
        ids are `member_id` of the first."""
        try:
            outcome, request_id, rings, early_ms = self._functions.call(
                "submit",
                first.timeout_ms,
                first.kind,
                first.idempotency_key or "",
                first.body_hash,
                first.max_open_requests,
                first.max_open_bytes,
                self._result_ttl_ms,
                first.priority,
                first.owner,
                first.requests_per_minute,
                first.tokens_per_minute,
                f"{first.spent_ms:.3f}",
                *(part for s in (first, *others) for part in pack_member(s)),
            )
        except OutOfMemoryError:
            return Submitted(SubmitOutcome.FULL, first.request_id, [])
        return Submitted(SubmitOutcome(outcome.decode()), request_id.decode(), unpack_rings(rings), early_ms)

    def sync(self, timeout_ms: int) -> bool:
        """Wait until all that was written before is on the server's disk. False: it was not in time.

        Raises UnsupportedServer for one that has no append-only file, or no WAITAOF: before Redis 7.2.
        """
        return self._commits.wait(timeout_ms)

    def earlier(self, idempotency_key: str) -> tuple[str, str] | None:
        """Id and body hash of the request that this key stands for, if it came before."""
        known = self._functions.call("earlier", idempotency_key)
        return (known[0].decode(), known[1].decode()) if known else None

    def cancel(self, request_id: str, *others: str) -> Cancelled:
        """Cancel wherever the request is, and the others of its group if they are named. A request that has
        ended stays as it is."""
        fields, rings = self._functions.call("cancel", request_id, *others)
        return Cancelled(unpack_record(request_id, fields), unpack_rings(rings))

    def record(self, request_id: str) -> Record | None:
        return unpack_record(request_id, self._functions.call("record", request_id))

    def state(self, request_id: str) -> State | None:
        """Of the record, and no more of it: who waits asks this again and again."""
        found: Any = self.redis.hget(f"{self.root}:req:{request_id}", "state")
        return State(found.decode()) if found else None

    def timeline(self, request_id: str) -> Timeline | None:
        fields, entries, now = self._functions.call("timeline", request_id)
        record = unpack_record(request_id, fields)
        if record is None:
            return None
        progress = dict(pairs(fields)).get(b"progress")
        stamps = Stamps.unpack(progress) if progress else None
        return Timeline(record, [Entry.unpack(entry) for entry in entries], float(now), stamps)

    def take_traces(self, limit: int, again_ms: int) -> list[str]:
        """Requests that have ended and whose trace is wanted, oldest first. Those that nobody drops within
        `again_ms` are taken again."""
        return [request_id.decode() for request_id in self._functions.call("take_traces", limit, again_ms)]

    def drop_traces(self, request_ids: Sequence[str]) -> None:
        """They are exported."""
        self._functions.call("drop_traces", *request_ids)

    def scores(self, request_id: str) -> PromptLogprobs | None:
        """Of its prompt, if they were asked for and are known."""
        packed: Any = self.redis.get(f"{self.root}:scores:{request_id}")
        return PromptLogprobs.unpack(packed) if packed else None

    def list_requests(self, limit: int, before: str | None = None, owner: str | None = None) -> list[Record]:
        """Newest first: open ones, and ended ones until they expire. `before`: the last id of a page.
        `owner` None: of everybody."""
        found = self._functions.call("list_requests", limit, before or "", "*" if owner is None else owner)
        records = (unpack_record(request_id.decode(), fields) for request_id, fields in pairs(found))
        return [record for record in records if record]

    def workers(self) -> list[WorkerCard]:
        """The cards of workers that renewed in the last 10 s."""
        return [unpack_card(dict(pairs(fields))) for fields in self._functions.call("workers")]

    # Claims

    def claim(
        self,
        leg: Leg,
        boot: str,
        nonce: str,
        room: int,
        free_tokens: int,
        capacity_tokens: int,
        lease_ms: int,
        wanted: str | None = None,
        wait_ms: int = 0,
    ) -> Claim | Left | None:
        """Take the leg that comes first among those of at most `free_tokens` tokens (prompt, stream and the
        next one), or `wanted` if it ranks with that one; only requests whose prompt and `max_tokens` fit in
        `capacity_tokens`. None: nothing fits, or an older leg that fits an empty worker has the next turn.

        `nonce` names this claim: a repeat returns the same leg. `room` is a random 63-bit candidate id for
        PREFILL. BOTH takes what PREFILL takes, without a room.

        A leg that another worker, by what it has of the prompt, would have computed sooner is left to that
        one for `wait_ms`, and what ranks with it may be taken instead. 0: nobody asks who has what.
        """
        reply = self._functions.call(
            "claim", leg, boot, nonce, room, free_tokens, capacity_tokens, lease_ms, wanted or "", wait_ms
        )
        return unpack_claim(leg, reply) if reply else None

    def claim_forks(self, hold: Hold, boot: str, lease_ms: int, nonces: Sequence[str]) -> Forked:
        """Take as many forks of a request as there are `nonces`, as BOTH would, where its prompt's KV is.
        The others go to the queue of the prefill leg. Nothing, if `hold` is over: then they are there."""
        assert hold.leg is not Leg.PREFILL
        reply, rings = self._functions.call(
            "claim_forks", *pack_hold(hold), boot, lease_ms, json.dumps(list(nonces))
        )
        return Forked([unpack_claimed(Leg.BOTH, fields) for fields in reply], unpack_rings(rings))

    def waiting(self, leg: Leg) -> Waiting:
        """What queues for PREFILL (BOTH asks the same) or DECODE."""
        legs, retracted, since_ms = self._functions.call(
            "waiting", Leg.DECODE if leg is Leg.DECODE else Leg.PREFILL
        )
        return Waiting(legs, bool(retracted), float(since_ms))

    # Metrics

    def backlog(self) -> list[Backlog]:
        """Each queue, as Prometheus wants to know it."""
        found = self._functions.call("backlog")
        return [Backlog(Leg(leg.decode()), bool(batch), legs, ms) for leg, batch, legs, ms in found]

    def counts(self) -> dict[tuple[str, ...], int]:
        """How often what has happened since the data in the server began: the names are in `rooms.lua`."""
        found: Any = self.redis.hgetall(f"{self.root}:counts")
        return {tuple(name.decode().split("/")): int(times) for name, times in found.items()}

    # Owners

    def publish(self, hold: Hold, room: int, pages: Sequence[int], row: int, first_page: int = 0) -> Moved:
        """The decode worker opens `pages` and metadata `row` to the prefill worker. It has the KV of the
        `first_page` pages that come before them."""
        assert hold.leg is Leg.DECODE
        where = pack_ints(pages), row, first_page
        return unpack_moved(self._functions.call("publish", *pack_hold(hold), room, *where))

    def published(self, room: int) -> PublishedPages | None:
        """What was published in a room, for a prefill worker that missed the mail."""
        reply = self._functions.call("published", room)
        if not reply:
            return None
        peer, nonce, pages, row, first_page = reply
        return PublishedPages(peer.decode(), nonce.decode(), unpack_ints(pages), int(row), int(first_page))

    def kv_ready(self, hold: Hold, room: int, prefilled: Prefilled, transfer: Transfer) -> Moved:
        """The prefill worker says that pages and row are DONE; its leg ends here."""
        assert hold.leg is Leg.PREFILL
        self._note_scores(hold, prefilled)
        return unpack_moved(
            self._functions.call("kv_ready", *pack_hold(hold), room, *prefilled.told, *transfer)
        )

    def emit(self, batch: Sequence[Emission]) -> list[Emitted]:
        """Append the tokens of one engine step, all requests in one call. Tokens already there stay."""
        if not batch:
            return []
        for emission in batch:
            self._note_scores(emission.hold, emission.prefilled)
        replies = self._functions.call("emit", *map(pack_emission, batch))
        return [
            Emitted(
                EmitOutcome(outcome.decode()),
                expected,
                tuple(unpack_rings(rings)),
                unpack_milestone(milestone),
            )
            for outcome, expected, rings, milestone in replies
        ]

    def _note_scores(self, hold: Hold, prefilled: Prefilled | None) -> None:
        """Before the first token, so that whoever has seen one can read them."""
        if prefilled is not None and prefilled.scores is not None:
            self._functions.call("note_scores", *pack_hold(hold), prefilled.scores.pack())

    def release(self, hold: Hold, why: Why, stamps: Stamps | None = None) -> Moved:
        """Give a leg back unfinished; it counts as no attempt. `stamps`: what was done until then."""
        told = stamps.pack() if stamps else ""
        return unpack_moved(self._functions.call("release", *pack_hold(hold), why, told))

    def fail(self, hold: Hold, code: str, message: str) -> Moved:
        """End the request with an error that another attempt would meet again."""
        return unpack_moved(self._functions.call("fail", *pack_hold(hold), code, message))

    # Workers

    def register(self, card: WorkerCard) -> None:
        self._functions.call("register", card.boot, *pack_card(card))

    def renew(
        self,
        boot: str,
        load: Load,
        holds: Sequence[Hold],
        lease_ms: int,
        progress: Mapping[str, Stamps] = MappingProxyType({}),
    ) -> Renewed:
        """Renew worker and legs, and give back every leg of `boot` that is not listed in `holds`. `progress`:
        what was done so far, by nonce.

        So the caller must be the thread that claims: what another one claims meanwhile would be given back.
        """
        known, epoch, answers, rings, workers = self._functions.call(
            "renew",
            boot,
            pack_load(load),
            lease_ms,
            json.dumps([pack_held(hold, progress) for hold in holds]),
        )
        kept = [
            Kept(hold, State(state.decode()), RoomState(room_state.decode()) if room_state else None)
            for hold, (owned, state, room_state) in zip(holds, answers)
            if owned
        ]
        lost = [Lost(hold, why.decode()) for hold, (owned, why, _) in zip(holds, answers) if not owned]
        return Renewed(
            bool(known), epoch, kept, lost, unpack_rings(rings), [boot.decode() for boot in workers]
        )

    def deregister(self, boot: str) -> list[Ring]:
        """Give back whatever `boot` still owns and drop its card and mail."""
        return unpack_rings(self._functions.call("deregister", boot))

    def ask(self, writer_boot: str, room: int, asker_boot: str) -> None:
        """Ask the writer of a room whether it can still write into the asker's pages."""
        self._functions.call("ask", writer_boot, room, asker_boot)

    def settle(self, room: int, asker_boot: str) -> None:
        """Answer: every handle posted for this room is DONE, and no further one will be posted."""
        self._functions.call("settle", room, asker_boot)

    def reap(self, lease_ms: int, suspect_after: int, ring_after_ms: int = 2_000) -> Reaped:
        """Expire leases and deadlines, ring again what nobody claimed. Any worker may call at any time."""
        rings, expired, failed = self._functions.call("reap", lease_ms, suspect_after, ring_after_ms)
        return Reaped(unpack_rings(rings), [i.decode() for i in expired], [i.decode() for i in failed])


def root_key(model: str) -> str:
    """The root of a model's keys; its braces are the hash tag that keeps them in one slot."""
    return f"kvr:{{{model}}}"
