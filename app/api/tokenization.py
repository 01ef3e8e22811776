"""/tokenize and /detokenize: what the served model makes of a text."""

from typing import Any

from flask import Blueprint, Response, jsonify
from pydantic import Field, model_validator

from app.fields.conversation import Conversation
from app.fields.message import Message
from app.fields.prompt import prompt_of_conversation, truncated
from app.fields.schema import validate
from app.gateway.errors import invalid
from app.gateway.service import Service, service
from app.gateway.strict import Strict
from app.generation.submit import current_body, no_such_model

resource = Blueprint("tokenization", __name__)


class TokenizeBody(Conversation):
    """`POST /tokenize`: a text, or a chat's whole body, of which only what makes the prompt counts."""

    prompt: str | None = None
    messages: list[Message] = Field(default_factory=list)
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_input(self) -> "TokenizeBody":
        if (self.prompt is None) == (not self.messages):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeBody(Strict):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


@resource.post("/tokenize")
def tokenize() -> Response:
    body = validate(TokenizeBody, current_body().fields)
    s = service()
    _check_model(s, body.model)
    if body.prompt is not None:
        text_ids = s.tokenizer.encode(body.prompt, body.add_special_tokens is not False)
        ids = truncated(tuple(text_ids), body, s.context_tokens)
    else:
        ids = prompt_of_conversation(s, body)
    reply: dict[str, Any] = {"count": len(ids), "max_model_len": s.context_tokens, "tokens": ids}
    if body.return_token_strs:
        reply["token_strs"] = [s.tokenizer.token_text(token) for token in ids]
    return jsonify(reply)


@resource.post("/detokenize")
def detokenize() -> Response:
    body = validate(DetokenizeBody, current_body().fields)
    s = service()
    _check_model(s, body.model)
    if any(not 0 <= token < s.tokenizer.vocab_size for token in body.tokens):
        raise invalid(f"tokens names one outside the vocabulary of {s.tokenizer.vocab_size}.", "tokens")
    return jsonify({"prompt": s.tokenizer.decode(body.tokens, skip_special_tokens=False)})


def _check_model(s: Service, name: str | None) -> None:
    if name not in (None, s.model):
        raise no_such_model(name or "")
