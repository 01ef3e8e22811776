"""One leg inside the engine, from Prefill or Prebuilt to its end."""

from dataclasses import dataclass, field

from workers.engine.messages import Work
from workers.engine.prefix import Digest
from workers.engine.sampling_state import SamplingState


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens are prompt ⧺ output. The pool holds the KV of the first `computed_tokens` of them.

    A token just sampled has no KV before the next step, so a sequence that decodes has one pending token.
    """

    work: Work
    relay: bool
    output_ids: list[int] = field(default_factory=list)  # over all attempts
    pages: list[int] = field(default_factory=list)
    digests: list[Digest] = field(default_factory=list)  # of the first whole pages, as far as known
    computed_tokens: int = 0
    cached_tokens: int = 0  # of them, found in the prefix cache at admission
    started: float | None = None  # when its first chunk began, monotonic seconds
    sampling_state: SamplingState | None = None
    failed: bool = False

    @property
    def key(self) -> str:
        return self.work.key

    @property
    def tokens(self) -> int:
        return len(self.work.prompt_ids) + len(self.output_ids)

    @property
    def pending_tokens(self) -> int:
        return self.tokens - self.computed_tokens

    @property
    def decoding(self) -> bool:
        """Its prompt is computed: it got a token in this attempt."""
        return len(self.output_ids) > len(self.work.emitted)

    @property
    def settled(self) -> bool:
        """Nothing is left to compute: it only keeps its pages until Drop."""
        return self.failed or (self.relay and self.decoding)

    def append(self, token_id: int) -> None:
        self.output_ids.append(token_id)
        if self.sampling_state is not None:
            self.sampling_state.append(token_id)

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop) of prompt ⧺ output."""
        prompt = self.work.prompt_ids
        if start >= len(prompt):
            return self.output_ids[start - len(prompt) : stop - len(prompt)]
        return [*prompt[start:stop], *self.output_ids[: max(0, stop - len(prompt))]]
