"""One leg inside the engine, from Prefill or Prebuilt to its end."""

from dataclasses import dataclass, field

from relay.prompt_logprobs import PromptLogprobs
from relay.stretches import Stretches
from workers.engine.messages import Work
from workers.engine.prefix import Digest
from workers.engine.sampling_state import SamplingState


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens are prompt ⧺ output. The pool holds the KV of the first `computed_tokens` of them.

    A token just sampled has no KV before the next step, so a sequence that decodes has one pending token.
    Steps that were launched bring the KV to `launched_tokens`. A token that one of them samples is unread
    until that step is over: the device knows it, the host does not.
    """

    work: Work
    relay: bool
    output_ids: list[int] = field(default_factory=list)  # over all attempts
    pages: list[int] = field(default_factory=list)
    digests: list[Digest] = field(default_factory=list)  # of the first whole pages, as far as known
    computed_tokens: int = 0
    launched_tokens: int = 0
    cached_tokens: int = 0  # of them, found in the prefix cache at admission
    chunks: Stretches = field(default_factory=Stretches)  # of its prompt, in monotonic seconds
    sampling_state: SamplingState | None = None
    scores: list[PromptLogprobs] = field(default_factory=list)  # of the prompt, chunk by chunk
    failed: bool = False

    @property
    def key(self) -> str:
        return self.work.key

    @property
    def tokens(self) -> int:
        return len(self.work.prompt_ids) + len(self.output_ids)

    @property
    def unread_tokens(self) -> int:
        return max(0, self.launched_tokens + 1 - self.tokens) if self.flying else 0

    @property
    def position(self) -> int:
        """Of the next output token to be sampled, over all attempts, from 0."""
        return len(self.output_ids) + self.unread_tokens

    @property
    def pending_tokens(self) -> int:
        """Tokens, unread ones too, that no step was launched for."""
        return self.tokens + self.unread_tokens - self.launched_tokens

    @property
    def flying(self) -> bool:
        """A step that was launched and is not over computes some of it."""
        return self.launched_tokens > self.computed_tokens

    @property
    def decoding(self) -> bool:
        """Its prompt is computed, or about to be: a token of this attempt is sampled."""
        return len(self.output_ids) > len(self.work.emitted) or self.unread_tokens > 0

    @property
    def scored(self) -> bool:
        """The log probabilities of its prompt are wanted, and no earlier attempt told them."""
        return self.work.params.prompt_logprobs is not None and not self.work.emitted

    @property
    def settled(self) -> bool:
        """Nothing is left to compute: it only keeps its pages until Drop."""
        return self.failed or (self.relay and self.decoding)

    def take_scores(self) -> PromptLogprobs | None:
        """Of the whole prompt, once it is computed; a prompt of one token has none."""
        scores, self.scores = self.scores, []
        return PromptLogprobs.join(scores) if scores else None

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
