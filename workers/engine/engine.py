"""The engine thread: commands in, one step after the other, events and tokens out."""

import logging
from collections import deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as Rows
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic, perf_counter

from torch import Tensor

from relay import log
from relay.sampling import SamplingParams
from workers.engine import policy
from workers.engine.batch import Row
from workers.engine.config import EngineConfig
from workers.engine.flight import Flight
from workers.engine.kv_pool import KVPool
from workers.engine.messages import (
    Admitted,
    Command,
    Computed,
    Crashed,
    Event,
    Heartbeat,
    Produced,
    Ready,
    Reserved,
    Retracted,
    Stop,
    Wake,
)
from workers.engine.pages import IntegrityError
from workers.engine.runner import ModelRunner, OnLayers
from workers.engine.sampler import Sampler, SamplingRow
from workers.engine.scheduler import Scheduler
from workers.engine.scoring import score
from workers.engine.sequence import Sequence
from workers.engine.stats import EngineStats
from workers.models.model import Model

logger = logging.getLogger(__name__)

QUIET_S = 1.0  # without work for this long; a large pool takes a while to check


class Engine:
    """Prefills, decodes, or both: what it does follows from its commands.

    Steps are launched and read in turn. Where the device computes by itself, the next step is launched before
    this one is read, with tokens that only the device knows; a sequence that turns out to have ended has then
    computed one token in vain, and keeps its pages until that step is over.

    The callbacks run on the engine thread and must only hand on what they get: `on_event` for control,
    `on_produced` once for all tokens of a step, `on_computed` inside the forward pass as layer groups of
    relayed prompts complete. Any thread may read `headroom`, `heartbeat` and `stats`: each is replaced whole.
    """

    def __init__(
        self,
        model: Model,
        kv: KVPool,
        sampler: Sampler,
        config: EngineConfig,
        *,
        eos_ids: Collection[int],
        salt: bytes,
        on_event: Callable[[Event], None],
        on_produced: Callable[[list[Produced]], None],
        on_computed: Callable[[Computed], None],
    ) -> None:
        """`salt` names the model in prefix cache keys."""
        self._runner = ModelRunner(model, kv, config.group_layers, config.group_bytes)
        self._sampler = sampler
        self._scheduler = Scheduler(kv.pages, kv.page_size, config, eos_ids, salt, self._can_sample)
        self._page_size = kv.page_size
        self._on_event = on_event
        self._on_produced = on_produced
        self._on_computed = on_computed
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._flights: deque[Flight] = deque()
        self._busy_since = 0.0  # monotonic seconds: since then the oldest flight is all that is computed
        self._stopping = False
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self.headroom = self._scheduler.headroom()
        self.heartbeat = Heartbeat(0, None)
        self.stats = EngineStats()

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread to end after Stop or a crash; False if it has not."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, command: Command) -> None:
        """Thread-safe; obeyed before the next step, in the order submitted."""
        self._commands.put(command)

    def step(self) -> bool:
        """Obey the commands there are, launch a step and read one. False if there was nothing to compute.

        For the engine's thread, or for a caller that has not started it.
        """
        self._obey_all()
        if self._stopping:
            while self._flights:
                self._read()
            self._publish()
            return False
        started = perf_counter()
        rows = self._next_rows()
        self._publish()
        if not rows and not self._flights:
            return False
        if rows:
            self._launch(rows)
        if len(self._flights) > (self._runner.ahead if rows else 0):
            self._read()
        self._publish()
        self.stats = self.stats._replace(
            steps=self.stats.steps + bool(rows), step_s=self.stats.step_s + perf_counter() - started
        )
        return True

    def check(self) -> None:
        """Raise IntegrityError unless every page has exactly one state. Only between steps."""
        self._scheduler.check()

    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self.step() and not self._stopping:
                    self._rest()
        except BaseException as error:
            logger.exception("engine_crashed step=%d", self.heartbeat.step)
            self._on_event(Crashed(error))

    def _rest(self) -> None:
        """Nothing can run before another command comes. In a quiet moment the accounts are checked."""
        try:
            command = self._commands.get(timeout=QUIET_S)
        except Empty:
            self._check_or_log()
            command = self._commands.get()
        self._obey(command)

    def _check_or_log(self) -> None:
        try:
            self.check()
        except IntegrityError as error:
            log.event(logger, "pages_leaked", logging.ERROR, error=error)

    def _obey_all(self) -> None:
        while not self._stopping:
            try:
                self._obey(self._commands.get_nowait())
            except Empty:
                return

    def _obey(self, command: Command) -> None:
        if isinstance(command, Stop):
            self._stopping = True
        else:
            self._scheduler.apply(command)

    def _next_rows(self) -> list[Row]:
        if self._flights and self._flights[-1].drawn is None:
            return []
        return self._scheduler.next_rows(self.heartbeat.step, monotonic())

    def _launch(self, rows: Rows[Row]) -> None:
        self._expect_end(self.heartbeat.step + 1, sum(row.query_tokens for row in rows))
        started = monotonic()
        planned = perf_counter()
        batch, plan = self._runner.prepare(rows, self._flights[-1].drawn if self._flights else None)
        begun = perf_counter()
        logits = self._runner.forward(batch, plan, self._reporter(rows))
        computed = perf_counter()
        sampling = [
            self._sampling_row(row.sequence, row.position) for row in rows if row.position is not None
        ]
        if scored := [row for row in rows if row.scored_ids]:
            self._score(scored, logits[len(sampling) :])
            logits = logits[: len(sampling)]
        if not self._flights:
            self._busy_since = started
        self._flights.append(Flight(rows, self._runner.choose(self._sampler, logits, sampling)))
        self._scheduler.launched(rows)
        stats = self.stats
        self.stats = stats._replace(
            plan_s=stats.plan_s + begun - planned,
            forward_s=stats.forward_s + computed - begun,
            sample_s=stats.sample_s + perf_counter() - computed,
        )

    def _score(self, rows: Rows[Row], logits: Tensor) -> None:
        """Keep the log probabilities of these rows' prompts; `logits` in their order."""
        ids = [row.scored_ids for row in rows]
        for row, own_ids, own in zip(rows, ids, logits.split(list(map(len, ids))), strict=True):
            row.sequence.scores.append(score(own, own_ids, row.sequence.work.params.prompt_logprobs or 0))

    def _read(self) -> None:
        """The end of the step that was launched first."""
        begun = perf_counter()
        rows, choice = flight = self._flights[0]
        sampled = choice.read()
        ended = perf_counter()
        self._flights.popleft()
        busy_since, self._busy_since = self._busy_since, monotonic()
        self._scheduler.finish(rows, sampled, busy_since, self._busy_since)
        self._expect_end(self.heartbeat.step)
        decoded = sum(row.decodes for row in rows)
        stats = self.stats
        self.stats = stats._replace(
            sample_s=stats.sample_s + ended - begun,
            prefill_tokens=stats.prefill_tokens + flight.tokens - decoded,
            decode_tokens=stats.decode_tokens + decoded,
        )

    def _expect_end(self, step: int, tokens: int = 0) -> None:
        """By when the steps that were launched, and one more of so many tokens, must be over."""
        tokens += sum(flight.tokens for flight in self._flights)
        self.heartbeat = Heartbeat(step, monotonic() + policy.step_seconds(tokens) if tokens else None)

    def _reporter(self, rows: Rows[Row]) -> OnLayers | None:
        """Tells the transfer of each relayed row's pages, as layers complete."""
        relayed = [row for row in rows if row.sequence.relay]
        if not relayed:
            return None

        def on_layers(first_layer: int, last_layer: int, ready: Ready | None) -> None:
            for row in relayed:
                # A chunk starts at a page, and only the last one of a prompt leaves a page unfilled.
                first_page = row.start // self._page_size
                last_page = policy.pages_for(row.context_tokens, self._page_size)
                self._on_computed(
                    Computed(row.sequence.key, first_layer, last_layer, first_page, last_page, ready)
                )

        return on_layers

    def _can_sample(self, params: SamplingParams) -> bool:
        return self._sampler.ready(params, lambda: self._commands.put(Wake()))

    def _sampling_row(self, sequence: Sequence, position: int) -> SamplingRow:
        params, prompt_ids, output_ids = sequence.work.params, sequence.work.prompt_ids, sequence.output_ids
        if sequence.sampling_state is None:
            sequence.sampling_state = self._sampler.new_state(params, prompt_ids, output_ids)
        return SamplingRow(params, prompt_ids, output_ids, position, sequence.sampling_state)

    def _publish(self) -> None:
        """Hand on what the scheduler has to tell, after the headroom that goes with it."""
        scheduler = self._scheduler
        events, scheduler.events = scheduler.events, []
        produced, scheduler.produced = scheduler.produced, []
        self.headroom = scheduler.headroom()
        for event in events:
            self._count(event)
            self._on_event(event)
        if produced:
            self._on_produced(produced)

    def _count(self, event: Event) -> None:
        stats = self.stats
        if isinstance(event, Admitted):
            self.stats = stats._replace(cached_tokens=stats.cached_tokens + event.cached_tokens)
        elif isinstance(event, Reserved):
            self.stats = stats._replace(
                reserved_tokens=stats.reserved_tokens + event.tokens,
                spared_tokens=stats.spared_tokens + event.first_page * self._page_size,
            )
        elif isinstance(event, Retracted):
            self.stats = stats._replace(retractions=stats.retractions + 1)
