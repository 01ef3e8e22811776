"""What the transitions of `rooms` answer. Each one names the doorbells that its caller must ring."""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from relay.prompt_logprobs import PromptLogprobs
from relay.request import Claimed, Finish, Hold, Leg, Record, Ring, State, Token
from relay.stamps import Stamps


class SubmitOutcome(StrEnum):
    """DUPLICATE: this idempotency key and body came before. CONFLICT: the key came with another body.
    FULL: too many requests are open, or the memory of the server is full. LIMITED: the API key has had what
    it may have in a minute. LATE: as fast as the queue moves, its turn comes after its deadline."""

    NEW = "new"
    DUPLICATE = "duplicate"
    CONFLICT = "conflict"
    FULL = "full"
    LIMITED = "limited"
    LATE = "late"


class Submitted(NamedTuple):
    """`request_id` is that of the first request; the earlier one for DUPLICATE and CONFLICT. `early_ms`: how
    long until a LIMITED or LATE one may come again."""

    outcome: SubmitOutcome
    request_id: str
    rings: list[Ring]
    early_ms: int = 0


class Cancelled(NamedTuple):
    """`record` None: no such request. `rings` for the forks that its end sets free."""

    record: Record | None
    rings: list[Ring]


class RoomState(StrEnum):
    OPEN = "open"
    PUBLISHED = "published"
    SEALED = "sealed"
    ENDED = "ended"


class Claim(NamedTuple):
    claimed: Claimed
    rings: list[Ring]


class Left(NamedTuple):
    """Whatever this worker could take is left to others that have more of the prompts, for so long."""

    ms: int


class Forked(NamedTuple):
    """The forks that were claimed; the others of their leader wait for a prefill worker now."""

    claimed: list[Claimed]
    rings: list[Ring]


class Waiting(NamedTuple):
    """`retracted`: the first leg of the queue was retracted before, so it goes ahead of all others.
    `since_ms`: when the first one came, server time in ms since the epoch; 0: there is none."""

    legs: int
    retracted: bool
    since_ms: float = 0


class Backlog(NamedTuple):
    """What waits in one queue, apart for lines of batches. `oldest_ms`: how long the oldest has waited."""

    leg: Leg
    batch: bool
    legs: int
    oldest_ms: int


class Moved(NamedTuple):
    """`ok` False: the call was stale, and the caller drops its leg."""

    ok: bool
    rings: list[Ring]


class Prefilled(NamedTuple):
    """How the prefill of this attempt went; `stamps` have its chunks. `scores` of the prompt where they were
    asked for."""

    stamps: Stamps
    scores: PromptLogprobs | None = None

    @property
    def told(self) -> tuple[int, str, str, str]:
        """What goes into record and timeline; scores have their own place."""
        assert self.stamps.prefill is not None
        start, end = self.stamps.prefill
        return self.stamps.cached_tokens, f"{start:.3f}", f"{end:.3f}", self.stamps.pack()


class Transfer(NamedTuple):
    """`us`: from the end of prefill compute until the metadata row was DONE. `spared_bytes`: of pages that
    the decode worker had."""

    us: int
    bytes: int
    descriptors: int
    spared_bytes: int = 0


class Emission(NamedTuple):
    """What one engine step adds to one request, from `start_position` on.

    `prefilled` comes once, from a unified worker: others report it with `kv_ready`."""

    hold: Hold
    start_position: int
    tokens: Sequence[Token]
    finish: Finish | None = None
    prefilled: Prefilled | None = None


class EmitOutcome(StrEnum):
    """GAP: the stream ends before `start_position`; send again from `expected` on. STALE: drop the leg.
    DONE: the request is finished."""

    OK = "ok"
    GAP = "gap"
    STALE = "stale"
    DONE = "done"


class Milestone(NamedTuple):
    """How far a request has come for which a client waits: told once with its `first` tokens and once with
    its end, to whoever emitted these. Times as in Timings, 0: not yet."""

    first: bool
    submitted: float
    claimed: float
    prefill_start: float
    prefill_end: float
    first_token: float
    ended: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class Emitted(NamedTuple):
    """`rings` for the forks that the end of this request sets free."""

    outcome: EmitOutcome
    expected: int = 0
    rings: tuple[Ring, ...] = ()
    milestone: Milestone | None = None


class Kept(NamedTuple):
    """A leg that its worker still owns, and how far its request is: what a lost mail would have said."""

    hold: Hold
    state: State
    room_state: RoomState | None


class Lost(NamedTuple):
    """A leg that a worker believes in and does not own. `why`: a terminal state, `requeued`, `expired`,
    `done` (the KV of this prefill leg is complete) or `unknown` (no such request)."""

    hold: Hold
    why: str


class Renewed(NamedTuple):
    """`known` False: register again. `epoch` changes when the server restarts, fails over or is flushed.
    `workers`: the boots of those that live."""

    known: bool
    epoch: bytes
    kept: list[Kept]
    lost: list[Lost]
    rings: list[Ring]
    workers: list[str]


class PublishedPages(NamedTuple):
    """Where the prefill worker writes a room's KV: what the mail `published` says."""

    peer_boot: str
    nonce: str
    pages: tuple[int, ...]
    row: int
    first_page: int = 0


class Reaped(NamedTuple):
    """Request ids of expired leases and of requests that failed in this call."""

    rings: list[Ring]
    expired: list[str]
    failed: list[str]
