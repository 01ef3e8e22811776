"""The prompt of a request, as its answer shows it."""

import codecs
from collections.abc import Callable
from typing import Any

from redis.exceptions import RedisError

from app.fields.shown import Shown, spelling
from app.gateway.errors import ApiError, redis_away
from app.generation.view import LEAST_LOGPROB
from relay.prompt_logprobs import PromptLogprobs
from relay.tokenizer import Tokenizer


class ShownPrompt:
    """`read_scores` reads the log probabilities of its tokens: they are there before the first token is."""

    def __init__(
        self,
        ids: tuple[int, ...],
        shown: Shown,
        tokenizer: Tokenizer,
        read_scores: Callable[[], PromptLogprobs | None],
    ) -> None:
        self.ids = ids
        self._shown = shown
        self._tokenizer = tokenizer
        self._read_scores = read_scores

    def logprobs(self, wanted: int) -> dict[str, Any]:
        """As `/v1/completions` shows those of output tokens, null for the first. Raises ApiError."""
        scores = self._scores()
        top = [_top(scores, i, wanted) for i in range(len(self.ids) - 1)]
        return {
            "tokens": [self._spell(token_id) for token_id in self.ids],
            "token_logprobs": [None, *(_finite(value) for value in scores.logprobs[:, 0].tolist())],
            "top_logprobs": [None, *({self._spell(i): value for i, value in best.items()} for best in top)]
            if wanted
            else [None] * len(self.ids),
            "text_offset": text_starts(self.ids, self._tokenizer),
        }

    def prompt_logprobs(self, wanted: int) -> list[dict[str, Any] | None]:
        """As vLLM shows them: per token an object of token ids, null for the first. Raises ApiError."""
        scores = self._scores()
        return [None, *(self._ranked(scores, i, wanted) for i in range(len(self.ids) - 1))]

    def likelihoods(self, start: int) -> list[tuple[int, float]]:
        """Id and log probability of each token behind `start`. Raises ApiError."""
        return [best[0] for best in self._lines(start, 0, 1)]

    def best(self, start: int, wanted: int) -> list[list[tuple[int, float]]]:
        """The best `wanted` in the place of each token behind `start`. Raises ApiError."""
        return self._lines(start, 1, 1 + wanted)

    def _lines(self, start: int, first: int, last: int) -> list[list[tuple[int, float]]]:
        scores = self._scores()
        ids, values = scores.ids[start:, first:last].tolist(), scores.logprobs[start:, first:last].tolist()
        return [
            list(zip(line, map(_finite, own), strict=True)) for line, own in zip(ids, values, strict=True)
        ]

    def _ranked(self, scores: PromptLogprobs, index: int, wanted: int) -> dict[str, Any]:
        best = {
            token_id: (value, rank) for rank, (token_id, value) in enumerate(_best(scores, index, wanted), 1)
        }
        own = int(scores.ids[index, 0])
        ranked = {own: (_finite(float(scores.logprobs[index, 0])), int(scores.ranks[index]))} | best
        return {
            str(token_id): {"logprob": value, "rank": rank, "decoded_token": self._spell(token_id)}
            for token_id, (value, rank) in ranked.items()
        }

    def _spell(self, token_id: int) -> str:
        return spelling(token_id, self._tokenizer, self._shown.ids_as_tokens)

    def _scores(self) -> PromptLogprobs:
        if len(self.ids) == 1:
            return PromptLogprobs.empty()
        try:
            scores = self._read_scores()
        except RedisError as error:
            raise redis_away() from error
        if scores is None:
            message = "Redis lost the log probabilities of the prompt: send the request again."
            raise ApiError(500, message, code="request_lost")
        return scores


def text_starts(ids: tuple[int, ...], tokenizer: Tokenizer) -> list[int]:
    """Where each token begins in the text of all of them; special ones are not part of it."""
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    starts, at = [], 0
    for token_id in ids:
        starts.append(at)
        if token_id not in tokenizer.special_ids:
            at += len(utf8.decode(tokenizer.token_bytes(token_id)))
    return starts


def _top(scores: PromptLogprobs, index: int, wanted: int) -> dict[int, float]:
    """The best `wanted` tokens and the token itself."""
    own = {int(scores.ids[index, 0]): _finite(float(scores.logprobs[index, 0]))}
    return own | dict(_best(scores, index, wanted))


def _best(scores: PromptLogprobs, index: int, wanted: int) -> list[tuple[int, float]]:
    ids, values = scores.ids[index, 1 : 1 + wanted], scores.logprobs[index, 1 : 1 + wanted]
    return [(token_id, _finite(value)) for token_id, value in zip(ids.tolist(), values.tolist(), strict=True)]


def _finite(value: float) -> float:
    return max(value, LEAST_LOGPROB)
