"""What a request is: its record, as every process reads it, and the claim on one of its legs."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from relay.sampling import SamplingParams
from relay.server_clock import ServerClock
from relay.trace_context import TraceContext

MAX_PRIORITY = 100
BATCH_PRIORITY = MAX_PRIORITY + 1  # of a line of a batch: everything else goes first


class Leg(StrEnum):
    """The half of a request that one worker owns at a time; BOTH is a unified worker's claim."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class State(StrEnum):
    QUEUED = "queued"
    PREFILL = "prefill"
    READY = "ready"
    DECODE = "decode"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in (State.FINISHED, State.FAILED, State.CANCELLED)


class Why(StrEnum):
    """Why an owner gives a leg back."""

    DRAIN = "drain"
    PRESSURE = "pressure"
    RETRACT = "retract"
    PEER = "peer"
    ERROR = "error"


class Ring(NamedTuple):
    """A doorbell that the caller of a transition must send: there is a leg to claim."""

    leg: Leg
    request_id: str
    prompt_tokens: int = 0


class Hold(NamedTuple):
    """Proof of a claim: what every write to the leg must name."""

    request_id: str
    leg: Leg
    fence: int
    nonce: str


def member_id(request_id: str, index: int) -> str:
    """The id of a member of the group whose first request is `request_id`, index 0."""
    return f"{request_id}-{index}" if index else request_id


@dataclass(frozen=True, slots=True)
class Submission:
    """A validated request on its way into the record. `timeout_ms` runs from acceptance.

    `priority` orders the queues, the lowest number first: -MAX_PRIORITY to MAX_PRIORITY, or BATCH_PRIORITY.
    `owner` names the API key it came with. The limits of that key (0: none) count prompts when they are
    submitted and answers when they end.
    `leader`: the request whose KV of the same prompt this one shares, if it comes about in time.
    `spent_ms`: since the client's call arrived. `trace`: which trace its spans belong to.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    timeout_ms: int
    idempotency_key: str | None = None
    body_hash: str = ""
    kind: str = "request"  # which API resource it came from: request, completion, chat
    max_open_requests: int = 10_000
    max_open_bytes: int = 1 << 30
    priority: int = 0
    owner: str = ""
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    leader: str | None = None
    spent_ms: float = 0.0
    trace: TraceContext | None = None


@dataclass(frozen=True, slots=True)
class Claimed:
    """A leg that this worker owns now. `emitted` are the tokens already in the stream: they are law.

    `room` is 0 for a unified claim. `prefill_boot` is the peer of a decode claim. `left_ms` was left until
    its deadline when it was claimed. `forks` is how many other samples of the prompt wait for its KV.
    """

    hold: Hold
    room: int
    attempt: int
    solo: bool
    prompt_ids: tuple[int, ...]
    emitted: tuple[int, ...]
    params: SamplingParams
    prefill_boot: str | None
    left_ms: float = field(compare=False)  # a repeated claim has less
    submitted_ms: float
    clock: ServerClock = field(compare=False)  # since the claim was answered
    forks: int = 0
    trace_id: str | None = None

    @property
    def logged(self) -> dict[str, str | None]:
        """What log lines call it by."""
        return {"request": self.hold.request_id, "trace_id": self.trace_id}

    @property
    def tokens(self) -> tuple[int, ...]:
        """What the prefill of this attempt computes: prompt ⧺ stream."""
        return self.prompt_ids + self.emitted


@dataclass(frozen=True, slots=True)
class Timings:
    """When the transitions of the last attempt happened, server time in ms since the epoch; 0: not yet.

    `transfer_us` is the time from the end of prefill compute to the row's DONE: what compute did not hide.
    `spared_bytes` of KV were not sent, since the decode worker had them.
    """

    submitted: float = 0
    claimed: float = 0
    published: float = 0
    prefill_start: float = 0
    prefill_end: float = 0
    ready: float = 0
    decode_claimed: float = 0
    first_token: float = 0
    ended: float = 0
    transfer_us: int = 0
    transfer_bytes: int = 0
    transfer_descriptors: int = 0
    spared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """A request as clients see it."""

    request_id: str
    state: State
    kind: str
    owner: str
    params: SamplingParams
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    attempts: int
    retractions: int
    finish_reason: str | None  # stop, length
    stop_reason: str | int | None  # the stop string or token that matched
    error_code: str | None
    error_message: str | None
    timings: Timings
    trace: TraceContext | None = None


class Token(NamedTuple):
    """One emitted token. `text` is the text that became certain with it (may be empty). `logprobs` is
    `[[token id, logprob], ...]`, the chosen one first, or None."""

    position: int
    token_id: int
    text: str
    logprobs: list[list[float]] | None = None


class Finish(NamedTuple):
    reason: str
    stop_reason: str | int | None = None
    text: str = ""  # held-back text that is released with the end
