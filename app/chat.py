"""POST /v1/chat/completions: the OpenAI view of a request for an assistant's turn."""

from typing import Any

from flask import Blueprint, Response

from app.generation import Generation
from app.logprobs import chat_logprobs
from app.prompt import prompt_of_conversation
from app.schema import ChatBody, parse
from app.service import service
from app.shown import Shown
from app.shown_prompt import ShownPrompt
from app.submit import current_body, submit
from relay.request import Token
from relay.tokenizer import Tokenizer
from relay.tokens import End

resource = Blueprint("chat", __name__)


class ChatView:
    """`echo` is the text of the message that the answer goes on with."""

    kind = "chat"
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, shown: Shown, tokenizer: Tokenizer, prompt: ShownPrompt, echo: str = "") -> None:
        self._shown = shown
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._echo = echo

    def first(self) -> dict[str, Any]:
        return _choice({"delta": {"role": "assistant", "content": self._echo}}, {})

    def token(self, token: Token) -> dict[str, Any]:
        return _choice({"delta": {"content": token.text}}, self._of([token]))

    def last(self, end: End) -> dict[str, Any]:
        return _choice({"delta": {"content": end.text} if end.text else {}}, {}, end)

    def whole(self, tokens: list[Token], end: End) -> dict[str, Any]:
        text = self._echo + "".join(token.text for token in tokens) + end.text
        message = {"role": "assistant", "content": text, "refusal": None}
        return _choice({"message": message}, self._of(tokens), end)

    def about_prompt(self) -> dict[str, Any]:
        ids = {"prompt_token_ids": list(self._prompt.ids)} if self._shown.token_ids else {}
        wanted = self._shown.prompt_logprobs
        return ids if wanted is None else ids | {"prompt_logprobs": self._prompt.prompt_logprobs(wanted)}

    def _of(self, tokens: list[Token]) -> dict[str, Any]:
        shown = self._shown
        ids = {"token_ids": [token.token_id for token in tokens]} if shown.token_ids else {}
        if shown.logprobs is None:
            return ids
        return ids | {"logprobs": chat_logprobs(tokens, shown.logprobs, self._tokenizer, shown.ids_as_tokens)}


def _choice(words: dict[str, Any], shown: dict[str, Any], end: End | None = None) -> dict[str, Any]:
    return {
        "index": 0,
        **words,
        "logprobs": None,
        "finish_reason": end.finish_reason if end else None,
        "stop_reason": end.stop_reason if end else None,
        **shown,
    }


@resource.post("/v1/chat/completions")
def create() -> Response:
    raw = current_body()
    body = parse(ChatBody, raw.fields)
    s = service()
    s.check_free_thread()
    prompt_ids = prompt_of_conversation(s, body)
    accepted = submit(s, ChatView.kind, body, prompt_ids, raw.digest)
    prompt = ShownPrompt(prompt_ids, body.shown, s.tokenizer, lambda: s.rooms.scores(accepted.request_id))
    view = ChatView(body.shown, s.tokenizer, prompt, body.echoed_text)
    return Generation(s, accepted, view).answer(body.stream, body.stream_options)
