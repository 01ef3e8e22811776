"""POST /v1/chat/completions: the OpenAI view of a request for an assistant's turn."""

from typing import Any

from flask import Blueprint, Response

from app.fields.prompt import prompt_of_conversation
from app.fields.schema import ChatBody, parse
from app.fields.shown import Shown
from app.gateway.service import service
from app.generation.generation import Generation
from app.generation.logprobs import chat_logprobs
from app.generation.shown_prompt import ShownPrompt
from app.generation.submit import current_body, submit_all
from app.tools.tool_reply import ToolReply
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

    def __init__(
        self,
        shown: Shown,
        tokenizer: Tokenizer,
        prompt: ShownPrompt,
        echo: str = "",
        tools: ToolReply | None = None,
    ) -> None:
        """`tools` where the answer may call some."""
        self._tools = tools
        self._shown = shown
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._echo = echo

    def first(self) -> dict[str, Any]:
        return _choice({"delta": {"role": "assistant", "content": self._echo}}, {})

    def token(self, token: Token) -> dict[str, Any]:
        delta = self._tools.delta(token.text) if self._tools else {"content": token.text}
        return _choice({"delta": delta}, self._of([token]))

    def last(self, end: End) -> dict[str, Any]:
        delta = {"content": end.text} if end.text else {}
        if self._tools:
            delta = self._tools.last_delta(end.text)
        return _choice({"delta": delta}, {}, end, self._called(end))

    def whole(self, tokens: list[Token], end: End) -> dict[str, Any]:
        text = "".join(token.text for token in tokens) + end.text
        said = self._tools.message(text) if self._tools else {"content": text}
        if self._echo:
            said["content"] = self._echo + (said["content"] or "")
        message = {"role": "assistant", "refusal": None} | said
        return _choice({"message": message}, self._of(tokens), end, self._called(end))

    def about_prompt(self) -> dict[str, Any]:
        ids = {"prompt_token_ids": list(self._prompt.ids)} if self._shown.token_ids else {}
        wanted = self._shown.prompt_logprobs
        return ids if wanted is None else ids | {"prompt_logprobs": self._prompt.prompt_logprobs(wanted)}

    def _called(self, end: End) -> str | None:
        """The reason to finish of an answer that ended by itself and called a tool."""
        called = self._tools is not None and self._tools.called and end.finish_reason == "stop"
        return "tool_calls" if called else None

    def _of(self, tokens: list[Token]) -> dict[str, Any]:
        shown = self._shown
        ids = {"token_ids": [token.token_id for token in tokens]} if shown.token_ids else {}
        if shown.logprobs is None:
            return ids
        return ids | {"logprobs": chat_logprobs(tokens, shown.logprobs, self._tokenizer, shown.ids_as_tokens)}


def _choice(
    words: dict[str, Any], shown: dict[str, Any], end: End | None = None, called: str | None = None
) -> dict[str, Any]:
    return {
        "index": 0,
        **words,
        "logprobs": None,
        "finish_reason": called or (end.finish_reason if end else None),
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
    accepted = submit_all(s, ChatView.kind, body, [prompt_ids], raw.digest, body.n)
    prompt = ShownPrompt(prompt_ids, body.shown, s.tokenizer, lambda: s.rooms.scores(accepted.request_id))
    ids = accepted.request_ids

    def new_view(index: int) -> ChatView:
        tools = tool_reply(body, s.tokenizer, ids[index])
        return ChatView(body.shown, s.tokenizer, prompt, body.echoed_text, tools)

    return Generation(s, accepted, new_view, body.n).answer(body.stream, body.stream_options)


def tool_reply(body: ChatBody, tokenizer: Tokenizer, answer_id: str) -> ToolReply | None:
    """What finds the calls in an answer; None where it may hold none."""
    form = body.calls_format(tokenizer)
    if form is None:
        return None
    names = {tool.function.name for tool in body.callable_tools}
    return ToolReply(form, names, body.parallel_tool_calls, answer_id)
