"""POST /v1/completions: the OpenAI view of a request for text."""

from typing import Any

from flask import Blueprint, Response

from app.generation import Generation
from app.logprobs import completion_logprobs
from app.prompt import prompt_of_text
from app.schema import CompletionBody, parse
from app.service import service
from app.submit import current_body, submit
from relay.request import Token
from relay.tokenizer import Tokenizer
from relay.tokens import End

resource = Blueprint("completions", __name__)


class CompletionView:
    kind = "completion"
    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def __init__(self, logprobs: int | None, tokenizer: Tokenizer) -> None:
        self._logprobs = logprobs
        self._tokenizer = tokenizer
        self._sent_chars = 0

    def first(self) -> None:
        return None

    def token(self, token: Token) -> dict[str, Any]:
        logprobs = self._shown_logprobs([token])
        self._sent_chars += len(token.text)
        return _choice(token.text, logprobs)

    def last(self, end: End) -> dict[str, Any]:
        return _choice(end.text, None, end)

    def whole(self, tokens: list[Token], end: End) -> dict[str, Any]:
        text = "".join(token.text for token in tokens) + end.text
        return _choice(text, self._shown_logprobs(tokens), end)

    def _shown_logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        return completion_logprobs(tokens, self._logprobs, self._sent_chars, self._tokenizer)


def _choice(text: str, logprobs: dict[str, Any] | None, end: End | None = None) -> dict[str, Any]:
    return {
        "index": 0,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": end.finish_reason if end else None,
        "stop_reason": end.stop_reason if end else None,
    }


@resource.post("/v1/completions")
def create() -> Response:
    raw = current_body()
    body = parse(CompletionBody, raw.fields)
    s = service()
    s.check_free_thread()
    accepted = submit(s, CompletionView.kind, body, prompt_of_text(s, body, body.prompt), raw.digest)
    view = CompletionView(body.top_logprobs_wanted, s.tokenizer)
    return Generation(s, accepted, view).answer(body.stream, body.stream_options)
