"""Log probabilities in the two forms of the OpenAI API."""

from collections.abc import Sequence
from typing import Any

from app.fields.shown import spelling
from app.generation.view import finite
from relay.request import Token
from relay.tokenizer import Tokenizer


def completion_logprobs(
    tokens: Sequence[Token],
    wanted: int,
    text_offset: int,
    tokenizer: Tokenizer,
    ids_as_tokens: bool = False,
) -> dict[str, Any]:
    """Of `/v1/completions`: four lists, an entry per token. The text of the first begins at `text_offset`."""
    shown: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        chosen, *others = finite(token.logprobs or [[token.token_id, 0.0]])
        shown["tokens"].append(spelling(token.token_id, tokenizer, ids_as_tokens))
        shown["token_logprobs"].append(chosen[1])
        best = [chosen, *_best(chosen, others, wanted)]
        top = {spelling(int(token_id), tokenizer, ids_as_tokens): logprob for token_id, logprob in best}
        shown["top_logprobs"].append(top if wanted else None)
        shown["text_offset"].append(text_offset)
        text_offset += len(token.text)
    return shown


def chat_logprobs(
    tokens: Sequence[Token], wanted: int, tokenizer: Tokenizer, ids_as_tokens: bool = False
) -> dict[str, Any]:
    """Of `/v1/chat/completions`: one object per token, with the best `wanted` beside it."""
    content = []
    for token in tokens:
        chosen, *others = finite(token.logprobs or [[token.token_id, 0.0]])
        best = [_entry(each, tokenizer, ids_as_tokens) for each in _best(chosen, others, wanted)]
        content.append(_entry(chosen, tokenizer, ids_as_tokens) | {"top_logprobs": best})
    return {"content": content, "refusal": None}


def _best(chosen: list[float], others: list[list[float]], wanted: int) -> list[list[float]]:
    """The most likely tokens, each once: the chosen one may or may not be among the others."""
    each_once = {entry[0]: entry for entry in [chosen, *others]}
    return sorted(each_once.values(), key=lambda entry: -entry[1])[:wanted]


def _entry(entry: list[float], tokenizer: Tokenizer, ids_as_tokens: bool) -> dict[str, Any]:
    token_id = int(entry[0])
    token = spelling(token_id, tokenizer, ids_as_tokens)
    return {"token": token, "logprob": entry[1], "bytes": list(tokenizer.token_bytes(token_id))}
