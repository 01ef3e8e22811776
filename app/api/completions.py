"""POST /v1/completions: the OpenAI view of a request for text."""

from typing import Any

from flask import Blueprint, Response

from app.fields.prompt import echoed_text, prompt_of_text
from app.fields.schema import CompletionBody, parse
from app.fields.shown import Shown
from app.gateway.service import service
from app.generation.generation import Generation
from app.generation.logprobs import completion_logprobs
from app.generation.shown_prompt import ShownPrompt
from app.generation.submit import current_body, submit_all
from relay.request import Token
from relay.tokenizer import Tokenizer
from relay.tokens import End

resource = Blueprint("completions", __name__)


class CompletionView:
    """`echo` is the text of the prompt where it comes before the answer, with its log probabilities if the
    answer has some."""

    kind = "completion"
    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def __init__(
        self, shown: Shown, tokenizer: Tokenizer, prompt: ShownPrompt, echo: str | None = None
    ) -> None:
        self._shown = shown
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._echo = echo
        self._begun = False
        self._sent_chars = len(echo or "")

    def first(self) -> dict[str, Any] | None:
        """The prompt at once, unless that waits for its log probabilities."""
        if self._echo is None or self._shown.logprobs is not None:
            return None
        return self._begin(_choice("", self._token_ids([])))

    def token(self, token: Token) -> dict[str, Any]:
        shown = self._token_ids([token]) | {"logprobs": self._logprobs([token])}
        self._sent_chars += len(token.text)
        return self._begin(_choice(token.text, shown))

    def last(self, end: End) -> dict[str, Any]:
        return self._begin(_choice(end.text, self._token_ids([]), end))

    def whole(self, tokens: list[Token], end: End) -> dict[str, Any]:
        text = "".join(token.text for token in tokens) + end.text
        shown = self._token_ids(tokens) | {"logprobs": self._logprobs(tokens)}
        if (wanted := self._shown.prompt_logprobs) is not None:
            shown["prompt_logprobs"] = self._prompt.prompt_logprobs(wanted)
        return self._begin(_choice(text, shown, end))

    def about_prompt(self) -> dict[str, Any]:
        return {}

    def _begin(self, choice: dict[str, Any]) -> dict[str, Any]:
        """The prompt is shown with whatever comes first."""
        if self._begun:
            return choice
        self._begun = True
        if self._shown.token_ids:
            choice["prompt_token_ids"] = list(self._prompt.ids)
        if self._echo is not None:
            choice["text"] = self._echo + choice["text"]
            if (wanted := self._shown.logprobs) is not None:
                choice["logprobs"] = _joined(self._prompt.logprobs(wanted), choice["logprobs"])
        return choice

    def _token_ids(self, tokens: list[Token]) -> dict[str, Any]:
        return {"token_ids": [token.token_id for token in tokens]} if self._shown.token_ids else {}

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        wanted, as_ids = self._shown.logprobs, self._shown.ids_as_tokens
        if wanted is None:
            return None
        return completion_logprobs(tokens, wanted, self._sent_chars, self._tokenizer, as_ids)


def _choice(text: str, shown: dict[str, Any], end: End | None = None) -> dict[str, Any]:
    return {
        "index": 0,
        "text": text,
        "logprobs": None,
        "finish_reason": end.finish_reason if end else None,
        "stop_reason": end.stop_reason if end else None,
        **shown,
    }


def _joined(before: dict[str, Any], after: dict[str, Any] | None) -> dict[str, Any]:
    return {name: values + (after[name] if after else []) for name, values in before.items()}


@resource.post("/v1/completions")
def create() -> Response:
    raw = current_body()
    body = parse(CompletionBody, raw.fields)
    s = service()
    s.check_free_thread()
    prompts = [prompt_of_text(s, body, prompt) for prompt in body.prompts]
    accepted = submit_all(s, CompletionView.kind, body, prompts, raw.digest, body.samples)
    leaders = accepted.leaders

    def new_view(index: int) -> CompletionView:
        number = index // body.samples
        ids, leader = prompts[number], leaders[number]
        prompt = ShownPrompt(ids, body.shown, s.tokenizer, lambda: s.rooms.scores(leader))
        echo = echoed_text(s.tokenizer, body, body.prompts[number], ids) if body.echo else None
        return CompletionView(body.shown, s.tokenizer, prompt, echo)

    return Generation(s, accepted, new_view, body.n).answer(body.stream, body.stream_options)
