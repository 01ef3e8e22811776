"""Which rows make the next step: sequences on their way through the engine, by its policy."""

import logging
from bisect import insort
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Rows

from relay import log
from relay.sampling import SamplingParams
from relay.stretches import Stretch
from workers.engine import policy
from workers.engine.batch import Row
from workers.engine.config import EngineConfig
from workers.engine.kv_cache import KVCache
from workers.engine.messages import (
    Admitted,
    Chunked,
    Drop,
    Event,
    Failed,
    Flush,
    Headroom,
    Prebuilt,
    Prefill,
    Prefilled,
    Produced,
    Prompted,
    Proven,
    Refused,
    Reserve,
    Reserved,
    Retracted,
    Sampled,
    Wake,
    Work,
)
from workers.engine.sampler import Unsampleable
from workers.engine.sequence import Sequence

logger = logging.getLogger(__name__)

_TOO_LATE = "The prompt could not have been computed before the deadline of its request."

SchedulerCommand = Prefill | Reserve | Prebuilt | Drop | Proven | Flush | Wake


def _arrival_ms(sequence: Sequence) -> float:
    return sequence.work.arrival_ms


def _any_solo(sequences: Iterable[Sequence]) -> bool:
    return any(sequence.work.solo for sequence in sequences)


class Scheduler:
    """Owns every sequence of the engine, which takes `events` and `produced` after each step.

    A leg is in one of three places: waiting (no pages), receiving (a peer writes its pages behind those that
    were cached), or active.
    """

    def __init__(
        self,
        total_pages: int,
        page_size: int,
        config: EngineConfig,
        eos_ids: Collection[int],
        salt: bytes,
        ready: Callable[[SamplingParams], bool],
    ) -> None:
        """`ready` tells whether a sequence can be sampled now; a Wake comes when that changes."""
        self.events: list[Event] = []
        self.produced: list[Produced] = []
        self.capacity_tokens = total_pages * page_size
        self._page_size = page_size
        self._config = config
        self._eos_ids = frozenset(eos_ids)
        self._limit_tokens = min(config.context_tokens, self.capacity_tokens)
        self._ready = ready
        self._kv = KVCache(total_pages, page_size, salt)
        self._waiting: list[Sequence] = []  # by arrival
        self._active: dict[str, Sequence] = {}
        self._admitted = 0
        self._tokens_per_s = 0.0  # of prompts, at best; 0: not known yet

    # ---- commands

    def apply(self, command: SchedulerCommand) -> None:
        match command:
            case Prefill():
                self._enqueue(command)
            case Reserve():
                self._reserve(command)
            case Prebuilt():
                self._join(command)
            case Drop():
                self._drop(command)
            case Proven():
                self._kv.prove(command.room)
            case Flush():
                self._kv.clear()

    def _enqueue(self, prefill: Prefill) -> None:
        self._admitted += 1
        sequence = self._sequence(prefill.work, prefill.relay)
        if sequence is not None:
            insort(self._waiting, sequence, key=_arrival_ms)

    def _reserve(self, reserve: Reserve) -> None:
        self._admitted += 1
        sequence = self._sequence(reserve.work, relay=False)
        if sequence is None:
            return
        if not self._kv.reserve(sequence, self._reserve_pages()):
            self.events.append(Refused(sequence.key))
            return
        pages, first = tuple(self._kv.received(sequence)), self._kv.first_received(sequence)
        self.events.append(Reserved(sequence.key, pages, first, sequence.tokens))

    def _sequence(self, work: Work, relay: bool) -> Sequence | None:
        """Without pages yet. None: it fails, since it never fits."""
        sequence = Sequence(work, relay, output_ids=list(work.emitted))
        if sequence.tokens > self._limit_tokens:
            self._fail(sequence.key, sequence.tokens)
            return None
        self._kv.know(sequence, sequence.tokens)
        return sequence

    def _join(self, prebuilt: Prebuilt) -> None:
        sequence = self._kv.join(prebuilt.key)
        if sequence is not None:
            self._active[sequence.key] = sequence
            self._continue(sequence, prebuilt.first)

    def _drop(self, drop: Drop) -> None:
        self.produced = [produced for produced in self.produced if produced.key != drop.key]
        if self._kv.drop_reserved(drop.key, drop.quarantine):
            return
        if drop.key in self._active:
            # A peer writes only to receiving pages, so there is nothing to put aside.
            self._release(self._active[drop.key])
        else:
            self._waiting = [sequence for sequence in self._waiting if sequence.key != drop.key]

    def _fail(self, key: str, tokens: int) -> None:
        """No end of another leg would ever make room for it."""
        reason = (
            f"{tokens} tokens do not fit into the {self._limit_tokens} of this worker: "
            "raise CONTEXT_TOKENS or KV_POOL_MB, or shorten the prompt"
        )
        self.events.append(Failed(key, reason))

    # ---- a step

    def next_rows(self, step: int, now: float) -> list[Row]:
        """Rows of step number `step`, with pages for their tokens. None: only a command can change that, or
        the end of a step that was launched."""
        self._admit(now)
        unsettled = self._unsettled()
        candidates = [
            sequence
            for sequence in unsettled
            if not self._full(sequence)
            and (sequence.sampling_state is not None or self._ready(sequence.work.params))
        ]
        flying = self._flying()
        if flying and (self._short_of_pages(candidates) or _any_solo((*flying, *unsettled))):
            return []
        for group in policy.turns([sequence.work.solo for sequence in candidates], step):
            rows = self._rows([candidates[i] for i in group])
            if rows:
                return rows
        return []

    def launched(self, rows: Rows[Row]) -> None:
        """The step's rows are being computed. Steps end in the order they are launched."""
        for row in rows:
            row.sequence.launched_tokens = row.context_tokens

    def finish(
        self, rows: Rows[Row], sampled: Rows[Sampled | Unsampleable], started: float, ended: float
    ) -> None:
        """The step's rows were computed between these monotonic seconds; `sampled` has one entry for each row
        that samples."""
        self._note_pace(rows, ended - started)
        choices = iter(sampled)
        for row in rows:
            sequence, choice = row.sequence, next(choices) if row.samples else None
            sequence.computed_tokens = row.context_tokens
            if self._active.get(sequence.key) is not sequence:
                self._kv.leave(sequence)  # it ended meanwhile, and this was computed in vain
                continue
            if not row.decodes:
                self._kv.share(sequence)
                chunk = Stretch(started, ended, row.query_tokens)
                sequence.chunks.add(chunk)
                if sequence.relay and not row.samples:
                    self.events.append(Chunked(sequence.key, chunk))
            if choice is not None and not sequence.failed:
                self._choose(row, choice)

    def _choose(self, row: Row, choice: Sampled | Unsampleable) -> None:
        sequence = row.sequence
        if isinstance(choice, Unsampleable):
            sequence.failed = True
            self.events.append(Failed(sequence.key, choice.reason, choice.code))
        elif sequence.relay:
            sequence.append(choice.token_id)
            self.events.append(Prefilled(sequence.key, choice, sequence.chunks.all, sequence.take_scores()))
        elif row.decodes:
            self._continue(sequence, choice)
        else:
            self.events.append(Prefilled(sequence.key, choice))
            prompted = Prompted(sequence.cached_tokens, sequence.chunks.all, sequence.take_scores())
            self._continue(sequence, choice, prompted)

    def _continue(self, sequence: Sequence, sampled: Sampled, prompted: Prompted | None = None) -> None:
        """The sequence's next token: report it, and end the sequence if it is the last."""
        position = len(sequence.output_ids)
        sequence.append(sampled.token_id)
        ending, stop_token = policy.verdict(
            sampled.token_id,
            position,
            sequence.tokens,
            sequence.work.params,
            self._eos_ids,
            self._limit_tokens,
        )
        if ending is not None:
            self._release(sequence)
        self.produced.append(Produced(sequence.key, position, sampled, ending, stop_token, prompted))

    def _unsettled(self) -> list[Sequence]:
        """What still computes, oldest first."""
        active = [sequence for sequence in self._active.values() if not sequence.settled]
        return sorted(active, key=_arrival_ms)

    def _full(self, sequence: Sequence) -> bool:
        """Its last token is about to be read: nothing is left to launch."""
        if not sequence.unread_tokens:
            return False
        tokens, max_tokens = sequence.tokens + sequence.unread_tokens, sequence.work.params.max_tokens
        return policy.full(sequence.position, tokens, max_tokens, self._limit_tokens)

    def _flying(self) -> list[Sequence]:
        """What steps that were launched compute."""
        return [*(sequence for sequence in self._active.values() if sequence.flying), *self._kv.leaving]

    def _short_of_pages(self, candidates: Rows[Sequence]) -> bool:
        """Whether one would have to be retracted, which only those may be whose every token was told."""
        needed = (self._kv.missing_pages(sequence) for sequence in candidates if sequence.decoding)
        return sum(needed) > self._kv.available_pages

    def _rows(self, group: Rows[Sequence]) -> list[Row]:
        decodes = [Row.next(sequence, 1) for sequence in group if sequence.decoding and self._grow(sequence)]
        prefills = [sequence for sequence in group if not sequence.decoding and sequence.key in self._active]
        taken = policy.chunks(
            policy.scored_pending(
                [sequence.pending_tokens for sequence in prefills],
                [sequence.scored for sequence in prefills],
                policy.pages_for(self._config.scored_tokens, self._page_size) * self._page_size,
            ),
            self._config.chunk_tokens,
            len(decodes),
            self._page_size,
        )
        return decodes + [
            Row.next(sequence, chunk) for sequence, chunk in zip(prefills, taken, strict=True) if chunk
        ]

    # ---- who comes in, and who has to go

    def _note_pace(self, rows: Rows[Row], seconds: float) -> None:
        """Small steps are slow for their tokens, and tell nothing of large ones."""
        tokens = sum(row.query_tokens for row in rows)
        if seconds > 0 and tokens > self._config.chunk_tokens - self._page_size:
            self._tokens_per_s = policy.pace(self._tokens_per_s, tokens, seconds)

    def _admit(self, now: float) -> None:
        pending = sum(sequence.pending_tokens for sequence in self._unsettled() if not sequence.decoding)
        while self._waiting and policy.wants_prefill(pending, self._config.chunk_tokens):
            sequence = self._waiting[0]
            found = self._kv.find(sequence)
            left_s = sequence.work.deadline - now
            if policy.too_late(left_s, sequence.tokens - len(found) * self._page_size, self._tokens_per_s):
                del self._waiting[0]
                self.events.append(Failed(sequence.key, _TOO_LATE, "timeout"))
                continue
            if not self._kv.admit(sequence, found, self._reserve_pages()):
                return  # it would take what others need soon
            del self._waiting[0]
            self._active[sequence.key] = sequence
            self.events.append(Admitted(sequence.key, tuple(sequence.pages), sequence.cached_tokens))
            pending += sequence.pending_tokens

    def _grow(self, sequence: Sequence) -> bool:
        """Make room for a token, at the cost of younger ones. False: it lost its own pages, or waits."""
        if sequence.key not in self._active:
            return False
        while self._kv.missing_pages(sequence) and not self._kv.extend(sequence):
            growing = self._growing()
            youngest = policy.victim([other.work.arrival_ms for other in growing])
            if youngest is None:
                return False
            self._retract(growing[youngest])
            if growing[youngest] is sequence:
                return False
        return True

    def _growing(self) -> list[Sequence]:
        return [sequence for sequence in self._active.values() if not sequence.relay and not sequence.settled]

    def _reserve_pages(self) -> int:
        """What those that run, or will once their KV has arrived, may need soon."""
        reserve, page_size = self._config.reserve_tokens, self._page_size
        running = sum(
            policy.growth_pages(
                sequence.tokens, len(sequence.pages), self._growth_limit(sequence), reserve, page_size
            )
            for sequence in self._growing()
        )
        return running + self._kv.receiving * policy.pages_for(reserve, page_size)

    def _growth_limit(self, sequence: Sequence) -> int:
        """No KV is ever stored beyond this many tokens."""
        return min(self._limit_tokens, len(sequence.work.prompt_ids) + sequence.work.params.max_tokens)

    def _retract(self, sequence: Sequence) -> None:
        log.event(logger, "leg_retracted", request=sequence.work.request_id, tokens=sequence.tokens)
        self._release(sequence)
        self.events.append(Retracted(sequence.key))

    def _release(self, sequence: Sequence) -> None:
        """The one way out for an active sequence."""
        del self._active[sequence.key]
        self._kv.release(sequence)

    # ---- what others may know

    def headroom(self) -> Headroom:
        pool = self._kv.pool
        waiting_pages = sum(policy.pages_for(sequence.tokens, self._page_size) for sequence in self._waiting)
        return Headroom(
            free_tokens=policy.free_tokens(
                self._kv.available_pages, self._reserve_pages(), waiting_pages, self._page_size
            ),
            capacity_tokens=self.capacity_tokens,
            running=len(self._unsettled()),
            waiting=len(self._waiting),
            free_pages=pool.free_pages,
            cached_pages=pool.cached_pages,
            held_pages=pool.held_pages,
            quarantined_pages=pool.quarantined_pages,
            total_pages=pool.total_pages,
            admitted=self._admitted,
        )

    def check(self) -> None:
        """See KVCache."""
        self._kv.check(self._active.values())
