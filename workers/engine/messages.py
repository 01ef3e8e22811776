"""What the engine thread is told and what it tells. A leg is named by its `key`: the nonce of its claim."""

from collections.abc import Callable
from enum import StrEnum
from math import inf
from typing import NamedTuple

from relay.prompt_logprobs import PromptLogprobs
from relay.sampling import SamplingParams
from relay.stretches import Stretch


class Sampled(NamedTuple):
    """One chosen token. `logprobs`: [[token id, logprob], ...], the chosen one first, or None."""

    token_id: int
    logprobs: list[list[float]] | None = None


class Work(NamedTuple):
    """What a leg computes from: the original prompt, the tokens already in the stream, and how to sample."""

    key: str
    request_id: str
    prompt_ids: tuple[int, ...]
    emitted: tuple[int, ...]
    params: SamplingParams
    solo: bool = False  # runs alone in its batch
    arrival_ms: float = 0.0  # of the request: the oldest is never retracted
    deadline: float = inf  # of the request, monotonic seconds


# ---- commands, from the control thread


class Prefill(NamedTuple):
    """Compute prompt ⧺ emitted and sample the next token. With `relay` the engine then holds the pages
    until Drop (answers Admitted, layer groups, Prefilled); without, it goes on decoding (a unified
    worker, or a fork beside its leader)."""

    work: Work
    relay: bool


class Reserve(NamedTuple):
    """Hold the pages of prompt ⧺ emitted that are in the prefix cache, and allocate the others, which a peer
    will write. Answers Reserved or Refused."""

    work: Work


class Prebuilt(NamedTuple):
    """The pages that were reserved for `key` hold the KV of prompt ⧺ emitted; `first` was sampled by the
    prefill worker. Joins the batch without a forward pass; `first` is reported as its first token."""

    key: str
    first: Sampled


class Drop(NamedTuple):
    """The leg is over, whatever it was doing; unknown keys are ignored. Its pages are freed (whole
    computed ones stay cached); with `quarantine` those that a peer may write are put aside under that room
    until Proven."""

    key: str
    quarantine: int | None = None


class Proven(NamedTuple):
    """No write of this room can come any more: free its quarantined pages."""

    room: int


class Flush(NamedTuple):
    """Forget the prefix cache. A running leg's pages come to be known again as it goes on."""


class Wake(NamedTuple):
    """A grammar is compiled: a leg that waited for it can go on."""


class Stop(NamedTuple):
    """End the engine loop after the current step."""


Command = Prefill | Reserve | Prebuilt | Drop | Proven | Flush | Wake | Stop


# ---- events, to the control thread


class Admitted(NamedTuple):
    """Pages of the whole prompt are held: `pages` in order of position, the first `cached_tokens` tokens
    already computed."""

    key: str
    pages: tuple[int, ...]
    cached_tokens: int


class Chunked(NamedTuple):
    """A chunk of the prompt is computed, and it was not the last. Monotonic seconds."""

    key: str
    chunk: Stretch


class Prefilled(NamedTuple):
    """The last chunk is computed, and the whole pages are in the prefix cache. When the chunks were, in
    monotonic seconds; `scores` where they were asked for."""

    key: str
    first: Sampled
    chunks: tuple[Stretch, ...] = ()
    scores: PromptLogprobs | None = None


class Reserved(NamedTuple):
    """A peer may write `pages`, which are those of a leg of `tokens` tokens from position `first_page` on.
    The pages before were in the prefix cache."""

    key: str
    pages: tuple[int, ...]
    first_page: int
    tokens: int


class Refused(NamedTuple):
    """There are no pages for this leg now: hand it back."""

    key: str


class Retracted(NamedTuple):
    """The running leg lost its pages to older ones; its KV is gone (whole pages may still be cached)."""

    key: str


class Failed(NamedTuple):
    """The leg cannot go on, and trying again would not help: fail its request. Pages it has are held
    until Drop."""

    key: str
    reason: str
    code: str = "engine_failed"


class Crashed(NamedTuple):
    """The engine thread ended by an exception; the process must exit."""

    error: BaseException


LegEvent = Admitted | Chunked | Prefilled | Reserved | Refused | Retracted | Failed
Event = LegEvent | Crashed


# ---- to the transfer thread, while a chunk is being computed

Ready = Callable[[], bool]


class Computed(NamedTuple):
    """Layers [first_layer, last_layer) of the pages at [first_page, last_page) of the leg's page list
    are complete, or, with `ready`, queued on a device and complete once it says so. Any thread may ask."""

    key: str
    first_layer: int
    last_layer: int
    first_page: int
    last_page: int
    ready: Ready | None = None


# ---- to the output thread, once per step


class Ending(StrEnum):
    STOP = "stop"
    LENGTH = "length"


class Prompted(NamedTuple):
    """How the prompt of a leg was computed: tokens found in the prefix cache, and when its chunks were, in
    monotonic seconds. `scores` where they were asked for."""

    cached_tokens: int
    chunks: tuple[Stretch, ...]
    scores: PromptLogprobs | None = None


class Produced(NamedTuple):
    """The next token of a leg; `position` counts output tokens over all attempts from 0. With `ending`
    it is the last: the engine has released the leg's pages. `stop_token` is the stop token id that
    matched (None for EOS). `prompted` comes with the first token after a prompt that was computed here."""

    key: str
    position: int
    sampled: Sampled
    ending: Ending | None = None
    stop_token: int | None = None
    prompted: Prompted | None = None


# ---- what other threads may read at any time


class Headroom(NamedTuple):
    """Replaced as a whole after each step. `free_tokens`: what a new leg may need now, after the reserve
    for running ones."""

    free_tokens: int
    capacity_tokens: int
    running: int
    waiting: int
    free_pages: int
    cached_pages: int
    held_pages: int
    quarantined_pages: int
    total_pages: int
    admitted: int  # Prefill and Reserve commands seen so far: what was sent beyond it is not in here yet


class Heartbeat(NamedTuple):
    """`deadline`: monotonic seconds by which the current step must be over; None between steps."""

    step: int
    deadline: float | None

    def late(self, now: float) -> bool:
        """The step should be over: the engine may be stuck."""
        return self.deadline is not None and now > self.deadline
