"""POST /v1/chat/completions: the OpenAI view of a request for an assistant's turn."""

from typing import Any

from flask import Blueprint, Response

from app.generation import Generation
from app.logprobs import chat_logprobs
from app.prompt import prompt_of_conversation
from app.schema import ChatBody, parse
from app.service import service
from app.submit import current_body, submit
from relay.request import Token
from relay.tokenizer import Tokenizer
from relay.tokens import End

resource = Blueprint("chat", __name__)


class ChatView:
    kind = "chat"
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, logprobs: int | None, tokenizer: Tokenizer) -> None:
        self._logprobs = logprobs
        self._tokenizer = tokenizer

    def first(self) -> dict[str, Any]:
        return _choice({"delta": {"role": "assistant", "content": ""}}, None)

    def token(self, token: Token) -> dict[str, Any]:
        return _choice({"delta": {"content": token.text}}, self._shown_logprobs([token]))

    def last(self, end: End) -> dict[str, Any]:
        return _choice({"delta": {"content": end.text} if end.text else {}}, None, end)

    def whole(self, tokens: list[Token], end: End) -> dict[str, Any]:
        text = "".join(token.text for token in tokens) + end.text
        message = {"role": "assistant", "content": text, "refusal": None}
        return _choice({"message": message}, self._shown_logprobs(tokens), end)

    def _shown_logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        return None if self._logprobs is None else chat_logprobs(tokens, self._logprobs, self._tokenizer)


def _choice(words: dict[str, Any], logprobs: dict[str, Any] | None, end: End | None = None) -> dict[str, Any]:
    return {
        "index": 0,
        **words,
        "logprobs": logprobs,
        "finish_reason": end.finish_reason if end else None,
        "stop_reason": end.stop_reason if end else None,
    }


@resource.post("/v1/chat/completions")
def create() -> Response:
    raw = current_body()
    body = parse(ChatBody, raw.fields)
    s = service()
    s.check_free_thread()
    accepted = submit(s, ChatView.kind, body, prompt_of_conversation(s, body), raw.digest)
    view = ChatView(body.top_logprobs_wanted, s.tokenizer)
    return Generation(s, accepted, view).answer(body.stream, body.stream_options)
