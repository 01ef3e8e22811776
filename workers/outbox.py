"""The output of one leg: every token of its request in memory, and how many of them the server has."""

from relay.answers import Emission, EmitOutcome, Emitted, Prefilled
from relay.request import Claimed, Finish, Token
from relay.stamps import Stamps
from relay.tokenizer import Tokenizer
from workers.detokenize import Detokenizer
from workers.engine.messages import Ending, Produced, Prompted, Sampled

_MOST_TOKENS = 256  # per emission: after an outage the server is not blocked by one long call


class Outbox:
    """Pure: it is told what was produced and what the server answered, and says what to send next.

    It keeps the tokens of earlier attempts too, since a server that lost its last second may ask for them.
    Their log probabilities are not known here.
    """

    def __init__(self, tokenizer: Tokenizer, claimed: Claimed) -> None:
        self._hold = claimed.hold
        self._clock = claimed.clock
        self._silent = claimed.params.max_tokens == 0
        self._include_stop = claimed.params.include_stop_str_in_output
        self._detokenizer = Detokenizer(tokenizer, claimed.prompt_ids, claimed.params)
        self._tokens: list[Token] = []
        self.finish: Finish | None = None
        for token_id in claimed.emitted:
            self._append(Sampled(token_id))
        self._sent = len(self._tokens)
        self._prompted: Prompted | None = None  # until the server has it
        self._answered_at: float | None = None  # monotonic seconds

    def add(self, produced: Produced) -> None:
        """Take the next token; after the end it is ignored. Raises ValueError when it is not the next."""
        if self.finish is not None:
            return
        self._prompted = produced.prompted or self._prompted
        if self._silent:
            self.finish = Finish(Ending.LENGTH.value)
            return
        if produced.position != len(self._tokens):
            raise ValueError(
                f"the engine produced position {produced.position}, expected {len(self._tokens)}"
            )
        if produced.ending is Ending.STOP and not self._include_stop:
            self._tokens.append(
                Token(produced.position, produced.sampled.token_id, "", produced.sampled.logprobs)
            )
        else:
            self._append(produced.sampled)
        if produced.ending is not None and self.finish is None:
            self.finish = Finish(produced.ending.value, produced.stop_token, self._detokenizer.flush())

    @property
    def pending(self) -> bool:
        """There is something that the server does not have yet."""
        return self._sent < len(self._tokens) or self.finish is not None

    def emission(self) -> Emission:
        """What to send next: the same again until `answer` tells how it went."""
        end = self._sent + _MOST_TOKENS
        finish = self.finish if end >= len(self._tokens) else None
        return Emission(self._hold, self._sent, self._tokens[self._sent : end], finish, self._prefilled())

    def answer(self, emission: Emission, emitted: Emitted) -> None:
        """The server has the tokens of `emission` now, or misses some before it.

        Raises ValueError for an answer that does not go with the emission.
        """
        if emitted.outcome is EmitOutcome.OK:
            self._sent = emission.start_position + len(emission.tokens)
            self._prompted = None
        elif emitted.outcome is EmitOutcome.GAP and emitted.expected < emission.start_position:
            self._sent = emitted.expected
        else:
            raise ValueError(f"the server answers {emitted} to tokens from {emission.start_position} on")

    def since_s(self, now: float) -> float | None:
        """Seconds since the tokens before arrived at the server; None for the first ones. `now` is when these
        did."""
        before, self._answered_at = self._answered_at, now
        return None if before is None else now - before

    def _prefilled(self) -> Prefilled | None:
        if self._prompted is None:
            return None
        cached_tokens, chunks, scores = self._prompted
        return Prefilled(Stamps.told(self._clock, cached_tokens, chunks), scores)

    def _append(self, sampled: Sampled) -> None:
        text, stop = self._detokenizer.push(sampled.token_id)
        self._tokens.append(Token(len(self._tokens), sampled.token_id, text, sampled.logprobs))
        if stop is not None:
            self.finish = Finish(Ending.STOP.value, stop)
